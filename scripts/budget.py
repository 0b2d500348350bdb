"""Count the project and fail over a limit of `[tool.pasta.budget]` in `pyproject.toml`.

Python is counted in tokens, so that names and lines may be as long as they need to be. A limit is
lowered (`--lower`) when there is room, and raised only with a sentence in the commit. `pasta run`
is counted by the modules that are imported when a tiny random checkpoint has answered.
"""

import ast
import io
import keyword
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
CORE = (
    "src/pasta_decoding/lang",
    "src/pasta_decoding/answer",
    "src/pasta_decoding/scheduling",
    "src/pasta_decoding/engines/base.py",
)
NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
POINTING = frozenset(
    [
        "one",
        "found",
        "own",
        "most",
        "least",
        "beside",
        "behind",
        "asked",
        "told",
        "said",
        "known",
        "place",
        "some",
        "kept",
        "more",
        "given",
        "held",
        "begun",
        "lone",
        "shown",
        "wanted",
        "whole",
    ]
)
"""Identifiers that point at a thing instead of naming it."""


def tracked(*paths: str, suffixes: str = "py") -> list[Path]:
    """Return the tracked files under `paths` with one of these suffixes."""
    listing = subprocess.check_output(["git", "ls-files", "-z", *paths], cwd=ROOT, text=True)
    files = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in files if path.suffix[1:] in suffixes.split() and path.is_file()]


def line_count(*paths: str, suffixes: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in tracked(*paths, suffixes=suffixes))


def tokens(path: Path) -> list[tokenize.TokenInfo]:
    """Return the Python tokens of a file: no comments, docstrings, blank or structure tokens."""
    source = path.read_text(encoding="utf-8")
    docstrings = set(_docstring_starts(ast.parse(source)))
    return [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NOT_COUNTED and token.start not in docstrings
    ]


def _docstring_starts(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Yield line and column of every string that stands alone, as docstrings do."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield node.lineno, node.col_offset


def token_count(*paths: str) -> int:
    return sum(len(tokens(path)) for path in tracked(*paths))


def pointing_names(*paths: str) -> int:
    """Count pointing identifiers among 10,000 names that are no keywords."""
    names = [
        token.string
        for path in tracked(*paths)
        for token in tokens(path)
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
    ]
    return round(10_000 * sum(name in POINTING for name in names) / len(names))


def tuple_assignments(*paths: str) -> int:
    """Count assignments of a tuple to a tuple, swaps aside, in 10,000 lines of code."""
    assignments = 0
    code_lines = 0
    for path in tracked(*paths):
        code_lines += len({token.start[0] for token in tokens(path)})
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assignments += isinstance(node, ast.Assign) and _pairs_unrelated_values(node)
    return round(10_000 * assignments / code_lines)


def _pairs_unrelated_values(node: ast.Assign) -> bool:
    [target, *_] = node.targets
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    targets = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return targets != values


def format_skips(*paths: str) -> int:
    return sum(path.read_text(encoding="utf-8").count("# fmt: skip") for path in tracked(*paths))


def commands(command: Any) -> Iterator[Any]:
    """Yield the commands below a group that do something."""
    for subcommand in getattr(command, "commands", {}).values():
        if hasattr(subcommand, "commands"):
            yield from commands(subcommand)
        else:
            yield subcommand


def command_counts() -> dict[str, int]:
    """Count all commands, and the options of all of them together (arguments and --help aside)."""
    from typer.main import get_command

    from pasta_decoding.cli import make_app

    all_commands = list(commands(get_command(make_app())))
    parameters = [parameter for command in all_commands for parameter in command.params]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    return {"commands": len(all_commands), "options": len(options)}


def modules(run: Callable[[], object]) -> int:
    """Count the modules of the package that `run` imports, beginning with none."""
    for name in _imported_modules():
        del sys.modules[name]
    with redirect_stdout(StringIO()):
        run()
    return len(_imported_modules())


def _imported_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "pasta_decoding"]


def pasta(*arguments: str) -> None:
    """Run a command in this process."""
    from pasta_decoding.cli import main

    if main(arguments):
        raise SystemExit(f"pasta {' '.join(arguments)} failed")


def modules_of_run() -> int:
    """Count the modules of `pasta run`, on a tiny random checkpoint."""
    from tests.checkpoint import make_checkpoint

    with TemporaryDirectory() as folder:
        tiny = make_checkpoint(Path(folder))
        model = ["--model", str(tiny.base), "--adapter", str(tiny.adapter), "--engine", "torch"]
        return modules(lambda: pasta("run", *model, "--max-tokens", "4", "Hello"))


def counts() -> dict[str, int]:
    """Return every count, by the name of its limit."""
    return {
        "source_tokens": token_count("src"),
        "core_tokens": token_count(*CORE),
        "other_source_lines": line_count("src", suffixes="cpp h html css js"),
        "test_tokens": token_count("tests"),
        "bench_and_script_tokens": token_count("bench", "scripts"),
        "pointing_names_in_10000": pointing_names("src"),
        "tuple_assignments_in_10000": tuple_assignments("src"),
        "format_skips": format_skips("src"),
        **command_counts(),
        "modules_of_help": modules(lambda: pasta("--help")),
        "modules_of_run": modules_of_run(),
        "readme_lines": line_count("README.md", suffixes="md"),
        "docs_words": sum(
            len(path.read_text(encoding="utf-8").split()) for path in tracked("docs", suffixes="md")
        ),
    }


def lowered(text: str, counted: dict[str, int]) -> str:
    """Return `pyproject.toml` with each limit lowered to its count and a hundredth more."""
    for name, count in counted.items():
        limit = re.search(rf"^{name} = ([\d_]+)$", text, re.M)
        assert limit, f"{name} has a limit"
        new_limit = min(int(limit[1]), count + count // 100)
        text = text.replace(limit[0], f"{name} = {new_limit}")
    return text


def main() -> int:
    """Print the table; return 1 if a count is over its limit. `--lower` lowers limits instead."""
    project = ROOT / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    limits = tomllib.loads(text)["tool"]["pasta"]["budget"]
    counted = counts()
    for name, count in counted.items():
        over = "  over its limit" if count > limits[name] else ""
        print(f"{name:27}{count:8}  of {limits[name]:7}{over}")
    if "--lower" in sys.argv:
        project.write_text(lowered(text, counted), encoding="utf-8")
        return 0
    return int(any(count > limits[name] for name, count in counted.items()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
