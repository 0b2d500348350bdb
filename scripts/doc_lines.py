"""Renew the lines in docs/architecture.md: in `file:line`: `name`, where the name is defined.

`make fix` does it; a test fails while a line is wrong.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def renewed(page: str) -> str:
    """Return the page with the lines of today."""
    return re.sub(r"`([\w/]+\.py):\d+`: `([\w.]+)`", _place, page)


def _place(found: re.Match[str]) -> str:
    path, name = found.groups()
    source = (ROOT / "src" / "pasta_decoding" / path).read_text(encoding="utf-8")
    lines = dict(_definitions(ast.parse(source)))
    [line] = [lines[name]] if name in lines else [lines[n] for n in lines if n.endswith(f".{name}")]
    return f"`{path}:{line}`: `{name}`"


def _definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{node.name}", node.lineno
            yield from _definitions(node, f"{inside}{node.name}.")
        else:
            yield from _definitions(node, inside)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
