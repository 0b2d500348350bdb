"""Parallel decoding that a language model plans itself: PASTA-LANG, interpreter, training."""

__version__ = "0.1.0"
