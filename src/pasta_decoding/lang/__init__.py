"""PASTA-LANG: the form and the meaning of an answer with parallel parts.

Characters and integers only: nothing here knows a tokenizer, a model or an engine.
"""
