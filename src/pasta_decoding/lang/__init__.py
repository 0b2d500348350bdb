"""PASTA-LANG: what an answer with parallel parts looks like, and what it means.

Characters and integers only: nothing here knows a tokenizer, a model or an engine.
"""
