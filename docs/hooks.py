"""What mkdocs adds to the pages of this folder: pages of other folders, and the references.

The command reference and the list of Python names are made from the program while the site is
built, so they cannot be out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer import Context
from typer.cli import get_docs_for_click
from typer.main import get_command

import pasta_decoding
from pasta_decoding.cli import make_app

FIELD = re.compile(r"^(\w+): +(?=\S)", re.M)
ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "LICENSE": "LICENSE.txt",
    "data/README.md": "data/README.md",
    "examples/README.md": "examples/README.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside of `docs/`, and the generated references."""
    found = {there: (ROOT / here).read_text(encoding="utf-8") for here, there in ELSEWHERE.items()}
    command = get_command(make_app())
    found["commands.md"] = get_docs_for_click(obj=command, ctx=Context(command), name="pasta")
    public = (name for name in pasta_decoding.__all__ if not name.startswith("_"))
    names = sorted(public, key=lambda name: (not name.islower(), name))  # functions first
    found["names.md"] = "# Python names\n\n" + "".join(f"::: pasta_decoding.{n}\n\n" for n in names)
    for path, text in found.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links between folders of the repository point to the site's pages."""
    here = Path(page.file.src_uri).parent
    if here == Path():
        return re.sub(r"\]\((?:docs/|\.\./)", "](", markdown).replace(
            "](LICENSE)", "](LICENSE.txt)"
        )
    return markdown.replace("](../docs/", "](../")


class FieldList(griffe.Extension):
    """Shows the fields that a docstring explains, one a line, as a list."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = FIELD.sub(r"- `\1`: ", obj.docstring.value)
