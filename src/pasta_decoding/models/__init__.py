"""Models: which tokens control, where the weights come from, how prompts become ids."""
