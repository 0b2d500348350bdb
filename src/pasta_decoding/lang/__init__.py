"""PASTA-LANG: what an answer with parallel parts looks like, and what it means.

Characters and integers only: nothing here knows a tokenizer, a model or an engine.
"""

from __future__ import annotations

from pasta_decoding.lang.check import RULES, Problem, check
from pasta_decoding.lang.parser import Parser, parse
from pasta_decoding.lang.tags import DEFAULT_TOKENS
from pasta_decoding.lang.tree import (
    Chunk,
    Node,
    Span,
    Sync,
    Tree,
    read,
    show,
    strip,
    valid_tokens,
    valid_topic,
)

__all__ = [
    "DEFAULT_TOKENS",
    "RULES",
    "Chunk",
    "Node",
    "Parser",
    "Problem",
    "Span",
    "Sync",
    "Tree",
    "check",
    "parse",
    "read",
    "show",
    "strip",
    "valid_tokens",
    "valid_topic",
]
