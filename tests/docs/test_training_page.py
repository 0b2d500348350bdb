"""Every command of docs/training.md, run as it stands, on a tiny model and a few rows.

Only sizes are made smaller, by flags put behind the page's own.
"""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import AutoConfig

from pasta_decoding.cli import main
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.models.checkpoint import load
from pasta_decoding.models.embedded import pull
from tests.checkpoint import TinyCheckpoint
from tests.docs.pages import ROOT, calls, pasta_arguments

PAGE = "docs/training.md"
SHIPPED = "data/annotated_clean.jsonl.gz"
ROWS = 24
SHORT = "--max-total-tokens 100000 --shorten-to 3000 --max-prompt-tokens 1000 --min-chunk-tokens 10"
# Its tokenizer writes a token a byte, so that what is short in tokens is long here.
SMALLER = {
    "data build": SHORT,
    "train sft": "--max-steps 2 --max-length 2048 --pack-tokens 2048 --warmup-steps 1 --no-bf16",
    "eval generate": "--limit 2 --max-tokens 50 --engine torch --dtype float32",
    "train preference": "--limit 4 --samples 8 --baseline-samples 1 --rounds 1 --max-tokens 200 "
    "--check-limit 1 --engine torch --dtype float32 --pairs-per-step 1 --no-bf16",
}
RUNS = ("sft", "baseline", "apar", "sequential", "balanced", "fast", "quality", "obeying")
EXACT = ("exact_first", "exact_second", "exact_third", "exact_fast")
LAST = ("kept_balanced", "kept_fast", "wide_balanced")
ITEMS = ("Morning walks", "Green tea", "Early nights", "Fresh bread")


def write(path: str, rows: Sequence[Mapping[str, object]]) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def listed(number: int) -> dict[str, str]:
    """A row of a made-up prompt, whose answer is a list of named items."""
    items = [
        f"{n}. **{name}**: they help most people to get through week {number} in a good mood."
        for n, name in enumerate(ITEMS, start=1)
    ]
    question = f"What helps in week {number} of the year?"
    asked = f"[Question]:{question}[Requirements]: Write a list."
    return {"id": f"h{number}", "source": "", "instruction": asked, "response": "\n".join(items)}


def prepare(cache: Path, base: Path) -> None:
    """Put what the page begins with into the folder that this is."""
    pull(cache, fetch=lambda _folder: base)
    with gzip.open(ROOT / SHIPPED, "rt", encoding="utf-8") as file:
        careful = [json.loads(line) for line, _ in zip(file, range(ROWS), strict=False)]
    plain = [row | {"response": strip(read(row["response"]))} for row in careful]
    write(SHIPPED, careful)
    write("IN.jsonl", plain[:4])
    write("hellobench_open.jsonl.gz", [listed(number) for number in range(8)])
    write("dolly_3k.jsonl.gz", [row | {"instruction": f"Again: {row['id']}?"} for row in plain])
    write("prompts_dev.jsonl.gz", [{"instruction": "Three good habits?"}])
    for name in (
        "written",
        "written_plain",
        "facts",
        "asked_lists",
        "obeying",
        "exact_plain",
        *EXACT,
        *LAST,
        "own_answers",
        "quality_answers",
        "liked",
        "preferred",
        "tagged",
        "tagged_answers",
        "asked_of_it",
    ):
        write(f"{name}.jsonl", [row | {"id": f"{name}-{row['id']}"} for row in careful])
    asked = [row["instruction"] for row in careful]
    parts = ("first", asked[:4]), ("second", asked[4:8]), ("third", asked[8:12])
    last = (*(f"wide_{name}_prompts" for name in ("balanced", "fast")), "clean_prompts")
    last += ("data/open_prompts", "first_open_prompts")
    again = ((name, asked[12:16]) for name in ("asked_again", *last))
    for name, questions in (*parts, *again):
        write(f"{name}.jsonl", [{"instruction": question} for question in questions])
    words = {"kind": "words", "arguments": {"at_least": 1}}
    demands = [{"instruction": question, "checks": [words]} for question in asked[:2]]
    for path in (
        "demands.jsonl",
        "data/preference_prompts.jsonl",
        "greedy_prompts.jsonl",
        "asked_300.jsonl",
        "asked_400.jsonl",
    ):
        write(path, demands)


@pytest.mark.slow
def test_every_command_of_the_page_works(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    prepare(tmp_path / "cache", tiny_checkpoint.base)
    for arguments in pasta_arguments(calls(PAGE, tmp_path_factory.mktemp("shell"))):
        line = shlex.join(arguments).replace("--layers 18", "--layers 1")
        flags = [SMALLER[step] for step in SMALLER if line.startswith(step)]
        status = main(shlex.split(" ".join([line, *flags])))
        if "--keep" in arguments:  # no answer of a tiny model ends, so none is sound
            kept = arguments[arguments.index("--keep") + 1]
            assert status == 2, line
            assert f"no answer is sound; {kept} was not written" in capsys.readouterr().err
            write(kept, [{"instruction": "?", "response": "A."}])
        else:
            assert status == 0, line
    for run in (*RUNS, *EXACT, *LAST, "obeying_liked", "tagged", "exact_sequential"):
        told = json.loads(Path(f"runs/{run}/adapter/pasta.json").read_text(encoding="utf-8"))
        assert (
            told["base"]["hidden_size"]
            == AutoConfig.from_pretrained(tiny_checkpoint.base).hidden_size
        )
    for name in (
        "fast_offsets",
        "balanced_offsets",
        "quality_mean",
        "quality_offsets",
        "tagged_offsets",
    ):
        assert load(Path("runs") / name).joins == ("kv", "text")
