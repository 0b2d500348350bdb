"""The model card of a merged checkpoint: what the hub shows, and how to use it where.

What was trained is told by the adapter's own card, its README.md in the hub's form: licence,
data, figures (`model-index`) and the sections named in `_KEPT_SECTIONS` go into the merged one.
Nothing is known of an adapter without one, and nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pasta_decoding.errors import PastaError
from pasta_decoding.models.checkpoint import Checkpoint

CARD = "README.md"

INTERVAL = "interval_95"
"""Of a metric's `args`: the ends of its interval of 95 %."""

_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.S)
_SECTION = re.compile(r"^## (.+)\n", re.M)
_RELATIVE_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)[^)]*\)")
_KEPT_SECTIONS = ("Data", "What to expect")
_KEPT_KEYS = ("language", "license", "license_name", "license_link", "datasets")
_JOIN_OF_SERVERS = "text"
_TAGS = ("pasta-decoding", "parallel-decoding", "custom_generate")


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """What an adapter's card says.

    front:    its metadata, as the hub reads it.
    sections: text behind each heading of the second level.
    """

    front: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)


def read_card(folder: Path) -> AdapterCard:
    """Return what the card in an adapter's folder says: nothing if there is none.

    Raises PastaError for metadata that are none.
    """
    path = folder / CARD
    if not path.is_file():
        return AdapterCard()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PastaError(f"{path} cannot be read: {error}") from error
    found = _FRONT.match(text)
    parts = _SECTION.split(text)
    sections = {
        name.strip(): body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    return AdapterCard({} if found is None else _metadata(found[1], path), sections)


def _metadata(text: str, path: Path) -> Mapping[str, Any]:
    try:
        front = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _broken(path, " ".join(str(error).split())) from error
    if not isinstance(front, dict):
        raise _broken(path, "it names nothing")
    try:
        list(_results(front))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _broken(path, f"model-index: {error!r}") from error
    return front


def _broken(path: Path, why: str) -> PastaError:
    return PastaError(
        f"the metadata of {path} cannot be read: {why}",
        hint="It is YAML between two lines of --- at its top; adapters/balanced has an example.",
    )


def model_card(
    checkpoint: Checkpoint, adapter: AdapterCard, *, banned: Sequence[int], gguf_key: str
) -> str:
    """Return the README.md of a merged Hugging Face folder.

    banned:   ids of the control tokens, which other programs must never sample.
    gguf_key: where a GGUF of ours names them.
    """
    base, joins = checkpoint.base.name, " and ".join(f"`{join}`" for join in checkpoint.joins)
    own = "".join(
        f"\n## {name}\n\n{_RELATIVE_LINK.sub(_linked_text, adapter.sections[name])}\n"
        for name in _KEPT_SECTIONS
        if name in adapter.sections
    )
    return _CARD.format(
        front=yaml.safe_dump(front_matter(checkpoint, adapter), sort_keys=False),
        base=base,
        serving=_serving(trained=_JOIN_OF_SERVERS in checkpoint.joins),
        scheme=checkpoint.scheme,
        joins=joins or "none",
        ids=", ".join(map(str, banned)),
        own=_figures(adapter.front) + own,
        suppress_tokens=gguf_key,
        licence=_licence(adapter.front),
    )


def front_matter(checkpoint: Checkpoint, adapter: AdapterCard) -> dict[str, Any]:
    """Return the metadata of a merged checkpoint."""
    said, base = adapter.front, checkpoint.base.name
    front: dict[str, Any] = {name: said[name] for name in _KEPT_KEYS if name in said}
    if _is_hub_name(base):
        front |= {"base_model": base, "base_model_relation": "finetune"}
    own = said.get("tags") or ()
    tags = dict.fromkeys([*_TAGS, *([own] if isinstance(own, str) else own)])
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": list(tags)}
    return front | {name: said[name] for name in ("model-index",) if name in said}


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _linked_text(link: re.Match[str]) -> str:
    """Return a link's text: files beside the adapter are not beside the merged checkpoint."""
    return link[1]


def _figures(front: Mapping[str, Any]) -> str:
    """Return the adapter's figures as tables, one for each set of prompts."""
    tables = []
    for measured_on, rows in _results(front):
        lines = [f"| {name} | {value} |" for name, value in rows]
        tables.append("\n".join([f"\n{measured_on}:\n", "| | |", "| --- | --- |", *lines, ""]))
    return "\n## Figures\n" + "".join(tables) if tables else ""


def _results(front: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each set of prompts in a `model-index` with its figures: name and value."""
    for model in front.get("model-index", ()):
        for result in model["results"]:
            rows = [(one.get("name", one["type"]), _value(one)) for one in result["metrics"]]
            yield result["dataset"]["name"], rows


def _value(metric: Mapping[str, Any]) -> str:
    interval = metric.get("args", {}).get(INTERVAL)
    if interval is None:
        return str(metric["value"])
    low, high = interval
    return f"{metric['value']} ({low} to {high})"


def _serving(*, trained: bool) -> str:
    """Return the recipe for vLLM. trained: for the join that servers can do."""
    if trained:
        return _SERVING.format(caution="", insist="")
    return _SERVING.format(caution=_UNTRAINED_JOIN, insist=" --join text")


def _licence(front: Mapping[str, Any]) -> str:
    if "license" not in front:
        return _UNKNOWN_LICENCE
    return f"`{front['license']}`, as of what was trained. What the base model's asks holds, too."


_UNKNOWN_LICENCE = """\
That of the base model and of the data that the adapter was trained on, whose card names none: see
there, and write `license` into the lines at the top before you publish this folder."""

_UNTRAINED_JOIN = """\
Servers can join the parts of an answer as text only, and this checkpoint was not trained for the
join `text`: `--join text` below insists, and expect less of what follows a join. On the engines of
one machine, `pasta serve --adapter THIS_FOLDER` answers as it was trained.

"""

_SERVING = """\
{caution}```sh
# in vLLM's environment: the logits processor pasta_decoding.vllm, which vLLM loads by itself
pip install --no-deps pasta-decoding
vllm serve THIS_FOLDER --enable-prefix-caching --enable-prompt-tokens-details --port 8000

# beside it: OpenAI's API, with answers in parallel
pip install "pasta-decoding[serve,remote]"
pasta serve --engine remote --base-url http://localhost:8000/v1 --adapter THIS_FOLDER{insist}
```

The folder is needed there, too, for its tokenizer and `pasta.json`, not for its weights. A server
without the logits processor will do, with more requests."""

_CARD = """\
---
{front}---

# {base}, trained for parallel decoding

This model marks the parts of an answer that do not depend on each other, and leaves it to the
program that runs it to have them written at the same time. That is Pasta (`pasta-decoding`).

| | |
| --- | --- |
| base model | {base}; what was trained is merged in |
| position scheme | `{scheme}` |
| joins | {joins} |
| control tokens | {ids} |

`pasta.json` holds all that decoding must agree on with training.

## In Pasta

```sh
pip install pasta-decoding
pasta run --adapter THIS_FOLDER "What are three good ways to learn a new language?"
```

## In transformers

With Pasta installed:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
question = [{{"role": "user", "content": "What are three good ways to learn a new language?"}}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
ids = model.generate(
    **inputs, max_new_tokens=300, custom_generate="THIS_FOLDER", trust_remote_code=True
)
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

`custom_generate=pasta_decoding.generate` does the same without code from this folder.

## In vLLM

{serving}
{own}
## In other programs

A program that does not know the language must never sample a control token. It would promise parts
of the answer that nobody writes: "1. sleep hygiene 2. sleep quality" is then all that is left.

- transformers: `suppress_tokens` in `generation_config.json` bans them, so plain `generate` answers
  sequentially, unless it is given a generation config of its own.
- vLLM and other servers do not read `suppress_tokens`: asked without Pasta in front of them, they
  need a `logit_bias` of -100 for each id.
- GGUF files: `pasta export` writes the ids into `{suppress_tokens}`; other
  converters do not.

Banned from promising, the model writes in a way that it was not trained for, and may repeat itself
more than under Pasta. For sequential answers alone, take a checkpoint that was trained for them.

## Licence

{licence}
"""
