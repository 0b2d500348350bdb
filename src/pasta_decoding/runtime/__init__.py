"""Where the language meets an engine: one answer's state, and the loop that decodes it."""
