"""The code of the pages runs, and every command line in them is one that `pasta` takes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import pasta_decoding as pasta
from pasta_decoding.answer import events
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from tests.checkpoint import TinyCheckpoint, torch_decoder
from tests.docs.pages import ROOT, Block, blocks, commands, leaves, options, parse, spans, text_of
from tests.server.running import running

PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("python", "serving", "training", "choosing", "how-it-works")),
    *(f"docs/{name}.md" for name in ("results", "language", "architecture")),
]
WITH_COMMANDS = [page for page in PAGES if any(commands(page))]
OF_OTHERS = {"--max-num-seqs", "--logits-processors", "--model_args", "--batch_size", "--help"}


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_line_is_taken_by_the_parser(page: str) -> None:
    for arguments in commands(page):
        parse(arguments)


@pytest.mark.parametrize("page", PAGES)
def test_prose_names_commands_and_flags_that_exist(page: str) -> None:
    known = options() | OF_OTHERS
    starts = {words[:count] for words in leaves() for count in range(1, len(words) + 1)}
    for span in spans(page):
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span))
        assert named <= known, span
        if command := re.match(r"pasta ([a-z]+)", span):
            assert (command[1],) in starts, span
        if re.fullmatch(r"(configs|deploy|examples|recipes)/[\w./-]+", span):
            assert (ROOT / span).exists(), span


@pytest.fixture
def tiny_front_door(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let `pasta.load` give the tiny checkpoint under any name, and export it to `merged`."""
    load = pasta.load
    export_hf(load_model(tiny_checkpoint.source), tmp_path / "merged")
    monkeypatch.chdir(tmp_path)

    def load_tiny(_name: str) -> pasta.Model:
        return load(tiny_checkpoint.adapter, model=tiny_checkpoint.base, engine="torch")

    monkeypatch.setattr(pasta, "load", load_tiny, raising=False)


def execute(*found: Block) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in found:
        exec(compile("\n" * (block.line - 1) + block.text, "page", "exec"), names)
    return names


@pytest.mark.usefixtures("tiny_front_door")
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_front_door_works_as_the_page_has_it(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = execute(*blocks(page, "python"))
    assert f"{names['answer'].tokens_per_step:.2f} tokens per step\n" in capsys.readouterr().out
    names["model"].close()


def test_openai_s_client_works_as_the_page_has_it(
    tiny_checkpoint: TinyCheckpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    [block] = [one for one in blocks("docs/serving.md", "python") if "import OpenAI\n" in one.text]
    decoder = torch_decoder(tiny_checkpoint.base, tiny_checkpoint.adapter)
    with running(decoder, model="pasta", answer_tokens=24) as server:
        execute(replace(block, text=block.text.replace("http://127.0.0.1:8000", server.url)))
    [question] = re.findall(r'"(Give me .*?)"', block.text)
    request = decoder.request(question, Rules(max_tokens=24), SamplingParams())
    assert capsys.readouterr().out == decoder.answer(request).text


def test_the_events_of_the_page_are_those_of_the_server() -> None:
    kinds = {kind.__name__.lower() for kind in get_args(events.Event)}
    [block] = blocks("docs/serving.md", "json")
    shown = [json.loads(line) for line in block.text.splitlines()]
    assert {event["type"] for event in shown} == kinds
    for event in shown:
        fields = set(getattr(events, event["type"].capitalize()).__dataclass_fields__)
        assert event.keys() - {"type", "step"} <= fields, event


def test_the_files_and_names_of_the_architecture_page_are_there() -> None:
    """A file without a folder stands in that of the file before it; `file`: `name` is in it."""
    page = text_of("docs/architecture.md")
    folder, found = ROOT, 0
    for path, name in re.findall(r"`([\w/]+\.py)`(?:: `([\w.]+)`)?", page):
        if "NAME" in path:
            continue
        roots = [ROOT / "src" / "pasta_decoding", ROOT] if "/" in path else [folder]
        [file, *_] = [root / path for root in roots if (root / path).is_file()] or [None]
        assert file is not None, path
        assert name.rpartition(".")[2] in file.read_text(encoding="utf-8"), (path, name)
        folder, found = file.parent, found + 1
    assert found > 25
