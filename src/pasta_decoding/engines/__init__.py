"""Token ids in, logits out: everything that runs a model. Knows nothing of the language."""

DEFAULT_CACHE_TOKENS = 8192
"""Tokens that a cache holds unless told otherwise: prompts and answers of all open requests."""
