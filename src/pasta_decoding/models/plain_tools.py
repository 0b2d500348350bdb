"""What a merged checkpoint tells tools that do not know the language, and people who meet it.

Such a tool would sample the control tokens and never write the chunks that they promise: a list
of headings would be all that is left of an answer. So the settings that travel with the weights
ban them, and the model writes its answer sequentially. Pasta itself does not read those settings.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pasta_decoding.models.checkpoint import Checkpoint

SUPPRESS_TOKENS = "tokenizer.ggml.suppress_tokens"
"""Of a GGUF: what llama.cpp's own commands never sample, since the end of July 2026 (its PR 26276).

Other programs over its library may pass it over, and so do older versions.
"""

CARD = "README.md"
RECIPE = "custom_generate"
"""Where transformers looks for the way in which a model wants to be decoded."""


def banned_ids(checkpoint: Checkpoint) -> list[int]:
    """Return what only Pasta may let a model write: the ids of all control tokens."""
    return sorted(checkpoint.control.ids)


def write_beside_weights(
    folder: Path, checkpoint: Checkpoint, settings: Any, eos_ids: Collection[int]
) -> None:
    """Write the model card and `generation_config.json` into a merged checkpoint's folder.

    settings: the model's own GenerationConfig, which is left as it is.
    """
    own = copy.deepcopy(settings)
    own.suppress_tokens = banned_ids(checkpoint)
    own.eos_token_id = sorted(eos_ids)
    own.save_pretrained(folder)
    (folder / CARD).write_text(model_card(checkpoint), encoding="utf-8")
    (folder / RECIPE).mkdir()
    (folder / RECIPE / "generate.py").write_text(_GENERATE, encoding="utf-8")
    (folder / RECIPE / "requirements.txt").write_text("pasta-decoding\n", encoding="utf-8")


def model_card(checkpoint: Checkpoint) -> str:
    """Return the README.md of a merged Hugging Face folder."""
    base, joins = checkpoint.base.name, " and ".join(f"`{join}`" for join in checkpoint.joins)
    front = f"base_model: {base}\n" if _is_hub_name(base) else ""
    return _CARD.format(
        front=front,
        base=base,
        scheme=checkpoint.scheme,
        joins=joins or "none",
        ids=", ".join(map(str, banned_ids(checkpoint))),
        suppress_tokens=SUPPRESS_TOKENS,
    )


def gguf_description(checkpoint: Checkpoint) -> str:
    """Return what a GGUF says of itself (`general.description`)."""
    ids = ",".join(map(str, banned_ids(checkpoint)))
    return (
        f"{checkpoint.base.name} trained for parallel decoding with Pasta (pasta-decoding): "
        "`pasta run --model FILE` writes the independent parts of an answer at the same time. "
        f"Other programs must never sample the control tokens ({ids}), or parts of answers are "
        f"missing: llama.cpp's own commands obey {SUPPRESS_TOKENS} since its PR 26276 (July 2026); "
        "elsewhere give each of these ids a logit bias of minus infinity. The model then writes "
        "sequentially."
    )


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


_GENERATE = """\
# How transformers has this model write the independent parts of an answer at the same time.

from pasta_decoding import generate

__all__ = ["generate"]
"""

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
{front}tags:
- pasta-decoding
- parallel-decoding
---

# {base}, trained for parallel decoding

This model marks the parts of an answer that do not depend on each other, and leaves it to the
program that runs it to have them written at the same time. That is Pasta (`pasta-decoding`):

```
pip install pasta-decoding
pasta run --adapter THIS_FOLDER "What are three good ways to learn a new language?"
```

or, in transformers, with Pasta installed:

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
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

`custom_generate=pasta_decoding.generate` does the same without code from this folder.

| | |
| --- | --- |
| base model | {base}; what was trained is merged in |
| position scheme | `{scheme}` |
| joins | {joins} |
| control tokens | {ids} |

`pasta.json` holds all that decoding must agree on with training.

## In other programs

A program that does not know the language must never sample a control token. It would promise parts
of the answer that nobody writes: "1. sleep hygiene 2. sleep quality" is then all that is left.

- transformers: `suppress_tokens` in `generation_config.json` bans them, so plain `generate` answers
  sequentially, unless it is given a generation config of its own.
- vLLM and other servers do not read `suppress_tokens`. Put Pasta in front of them (`pasta serve
  --engine remote`, for checkpoints with the join `text`), or send `logit_bias` -100 for each id.
- GGUF files: `pasta export` writes the ids into `{suppress_tokens}`; other
  converters do not.

Banned from promising, the model writes in a way that it was not trained for, and may repeat itself
more than under Pasta. For sequential answers alone, take a checkpoint that was trained for them.

## Licence

That of the base model and of the data that the adapter was trained on; see their own cards.
"""
