"""What the golden files hold, computed anew through the doors that users take.

`python -m tests.golden.golden` writes the files; names behind it (`torch`, `llama`, `run`,
`openapi`, `losses`) write only those. A file is renewed on purpose, never to make a test pass:
the commit that renews one says which values changed, and why.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import pasta_decoding as pasta
from pasta_decoding.cli import main

HERE = Path(__file__).parent
MAX_TOKENS = 96
NEAR_TIE = {"torch": 1e-3, "llama": 1e-2}
"""Logits of two tokens that are closer than this may change places on another machine."""

PROMPTS = [
    "What can I do to sleep better?",
    "Name three European capitals and say one sentence about each.",
    "How do I write a good resume?",
    "What is the difference between a frog and a toad?",
    "Give me five tips for saving money.",
    "Why is the sky blue?",
    "Explain the water cycle.",
    "What are the benefits of regular exercise?",
    "How many legs does a spider have?",
    "Compare cats and dogs as pets.",
    "List four renewable energy sources and how they work.",
    "Write a short letter that thanks a teacher.",
    "What should I pack for a week at the beach?",
    "Describe the planets Mars and Venus, then say which is hotter.",
    "How do I make a cup of tea?",
    "What were the main causes of World War I?",
    "Suggest three hobbies for someone who likes being outdoors.",
    "What is photosynthesis?",
    "How can a small shop attract more customers?",
    "Translate 'good morning' into French.",
]

ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch", "dtype": "float32"},
    "llama": {"engine": "llama", "dtype": "float16"},
}


def answer(model: pasta.Model, prompt: str, *, parallel: bool) -> dict[str, Any]:
    """Return token ids in reading order, steps and text of one greedy answer."""
    with model.stream(prompt, max_tokens=MAX_TOKENS, parallel=parallel) as stream:
        text = "".join(stream)
    layout = stream.answer.layouts[-1]
    return {
        "tokens": list(layout.tokens[stream.result.usage.prompt_tokens :]),
        "steps": stream.result.critical_path,
        "text": text,
    }


def run_json() -> dict[str, Any]:
    """Return what `pasta run --json` prints, without what a clock says."""
    flags = ["--json", "--engine", "torch", "--dtype", "float32", "--max-tokens", "64"]
    found: dict[str, Any] = json.loads(_pasta("run", *flags, PROMPTS[4]))
    return {key: value for key, value in found.items() if not key.endswith("_s")}


def openapi() -> dict[str, Any]:
    """Return the server's schema as flat `path: value` pairs, without prose."""
    from pasta_decoding.server.app import create_app
    from pasta_decoding.server.metrics import Metrics
    from pasta_decoding.server.settings import Settings

    page = create_app({}, Metrics(), Settings()).openapi()
    return {path: value for path, value in flat(page) if path != "/info/version"}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a JSON value; lists of names are leaves, sorted."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not (key in ("description", "title", "summary") and isinstance(inner, str)):
                yield from flat(inner, f"{path}/{key.replace('/', '~')}")
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{path}/{number}")
    else:
        yield path, sorted(value, key=str) if isinstance(value, list) else value


ROWS = [
    ("Two cities?", '1. <promise topic="Paris" tokens="20"/><async>Paris.</async>'),
    ("Two drinks?", '<promise topic="Tea" tokens="20"/><async>Tea.</async> And milk.'),
    ("Sum?", '<promise topic="One" tokens="20"/><async>One.</async><sync/> Three.'),
    ("Hello?", "Hello."),
]


LOSSES = ("step", "loss", "text_loss", "control_loss", "sft", "replay", "ratio_best", "ratio_worst")


def losses() -> dict[str, Any]:
    """Return the losses of 30 steps of stage 1, and of one round of stage 2, on a tiny model."""
    from tests.checkpoint import BASE_NAME, make_adapter, make_base

    with TemporaryDirectory() as folder:
        here = Path(folder)
        base = talkative(make_base(here / "base"))
        adapter = make_adapter(base, here / "adapter")
        rows, prompts = here / "rows.jsonl", here / "prompts.jsonl"
        rows.write_text(
            "\n".join(
                json.dumps({"id": str(n), "source": "", "instruction": asked, "response": said})
                for n, (asked, said) in enumerate(ROWS)
            )
        )
        prompts.write_text("\n".join(json.dumps({"instruction": asked}) for asked, _ in ROWS))
        common = ["--model", str(base), "--learning-rate", "1e-3"]
        shared = {"bf16": False, "save_every_steps": 30, "warmup_steps": 2}
        sft = ["--data", str(rows), "--out", str(here / "sft")]
        size = ["--max-steps", "30", "--epochs", "60", "--packs-per-step", "2"]
        file = _settings(here / "sft.yaml", base_name=BASE_NAME, try_prompts=0, **shared)
        _pasta("train", "sft", *sft, *size, "--pack-tokens", "160", *common, *file)
        policy = ["--policy", str(adapter), "--baseline", str(adapter), "--engine", "torch"]
        where = ["--prompts", str(prompts), "--out", str(here / "preference")]
        size = ["--samples", "6", "--max-tokens", "80"]
        size += ["--quality", "likelihood", "--replay", str(rows)]
        rare = {"dtype": "float32", "pairs_per_step": 1}
        file = _settings(here / "preference.yaml", **rare, **shared)
        _pasta("train", "preference", *policy, *where, *size, *common, *file)
        return {
            "sft": _metrics(here / "sft"),
            "preference": _metrics(here / "preference" / "round-1" / "train"),
        }


def _settings(path: Path, **settings: Any) -> list[str]:
    path.write_text(json.dumps(settings))
    return ["--config", str(path)]


def talkative(base: Path) -> Path:
    """Let a tiny model end its answers now and then: its end weighs more."""
    from safetensors.torch import load_file, save_file

    from tests.checkpoint import END_ID

    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"][END_ID] *= 2.5
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    return base


def _metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key in LOSSES} for line in lines
    ]


def _pasta(*arguments: str) -> str:
    with redirect_stdout(StringIO()) as out:
        assert main(arguments) == 0
    return out.getvalue()


def make_answers(engine: str) -> list[dict[str, Any]]:
    """Return both answers to each prompt, and how near the nearest tie was."""
    made: list[dict[str, Any]] = []
    with pasta.load("balanced", **ENGINES[engine]) as model, _gaps(model) as gaps:
        for prompt in PROMPTS:
            one: dict[str, Any] = {"prompt": prompt}
            for name in ("parallel", "sequential"):
                gaps.clear()
                one[name] = answer(model, prompt, parallel=name == "parallel")
                one[name]["least_gap"] = float(f"{min(gaps):.2g}")
            made.append(one)
    return made


@contextmanager
def _gaps(model: pasta.Model) -> Iterator[list[float]]:
    """Note the least difference among the three largest logits of every row."""
    kind: Any = type(model.decoder.engine)  # type: ignore[attr-defined]
    step, found = kind.step, []

    def noting(self: Any, feeds: Any) -> Any:
        logits_FV = step(self, feeds)
        if len(logits_FV):
            top_F3 = np.sort(np.asarray(logits_FV), axis=1)[:, -3:]
            found.append(float(np.diff(top_F3, axis=1).min()))
        return logits_FV

    kind.step = noting
    try:
        yield found
    finally:
        kind.step = step


MAKERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: make_answers("torch"),
    "llama": lambda: make_answers("llama"),
    "run": run_json,
    "openapi": openapi,
    "losses": losses,
}


def read(name: str) -> Any:
    """Return what a golden file holds."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, value: Any) -> None:
    """Write a golden file, an entry a line, so that a diff shows what changed."""
    if isinstance(value, list):
        lines = [json.dumps(one, ensure_ascii=False) for one in value]
        text = "[\n" + ",\n".join(lines) + "\n]\n"
    else:
        lines = [f"{json.dumps(key)}: {json.dumps(value[key])}" for key in sorted(value)]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
    (HERE / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        write(name, MAKERS[name]())
