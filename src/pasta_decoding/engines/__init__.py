"""Token ids in, logits out: everything that runs a model. Knows nothing of the language."""
