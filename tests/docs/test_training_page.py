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
from pasta_decoding.models.pull import pull
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
    "train preference": "--limit 4 --samples 8 --baseline-samples 1 --rounds 1 --max-tokens 200 "
    "--engine torch --dtype float32 --pairs-per-step 1 --no-bf16",
}
RUNS = ("sft", "baseline", "apar", "balanced", "fast")
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
    pull(cache, fetch=lambda *_: base)
    with gzip.open(ROOT / SHIPPED, "rt", encoding="utf-8") as file:
        careful = [json.loads(line) for line, _ in zip(file, range(ROWS), strict=False)]
    plain = [row | {"response": strip(read(row["response"]))} for row in careful]
    write(SHIPPED, careful)
    write("IN.jsonl", plain[:4])
    write("hellobench_open.jsonl.gz", [listed(number) for number in range(8)])
    write("dolly_3k.jsonl.gz", [row | {"instruction": f"Again: {row['id']}?"} for row in plain])
    asked = [row["instruction"] for row in careful]
    for name, questions in (("first", asked[:4]), ("second", asked[4:8])):
        write(f"{name}.jsonl", [{"instruction": question} for question in questions])


@pytest.mark.slow
def test_every_command_of_the_page_works(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    prepare(tmp_path / "cache", tiny_checkpoint.base)
    for arguments in pasta_arguments(calls(PAGE, tmp_path_factory.mktemp("shell"))):
        line = shlex.join(arguments)
        flags = [SMALLER[step] for step in SMALLER if line.startswith(step)]
        assert main(shlex.split(" ".join([line, *flags]))) == 0, line
    hidden_size = AutoConfig.from_pretrained(tiny_checkpoint.base).hidden_size
    for run in RUNS:
        told = json.loads(Path(f"runs/{run}/adapter/pasta.json").read_text(encoding="utf-8"))
        assert told["base"]["hidden_size"] == hidden_size
