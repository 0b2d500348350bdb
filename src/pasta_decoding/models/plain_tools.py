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

from pasta_decoding.models.card import CARD, AdapterCard, model_card
from pasta_decoding.models.checkpoint import Checkpoint

SUPPRESS_TOKENS = "tokenizer.ggml.suppress_tokens"
"""Of a GGUF: what llama.cpp's own commands never sample, since the end of July 2026 (its PR 26276).

Other programs over its library may pass it over, and so do older versions.
"""

RECIPE = "custom_generate"
"""Where transformers looks for the way in which a model wants to be decoded."""


def banned_ids(checkpoint: Checkpoint) -> list[int]:
    """Return what only Pasta may let a model write: the ids of all control tokens."""
    return sorted(checkpoint.control.ids)


def write_beside_weights(
    folder: Path,
    checkpoint: Checkpoint,
    settings: Any,
    eos_ids: Collection[int],
    adapter: AdapterCard = AdapterCard(),  # noqa: B008, it is frozen
) -> None:
    """Write the model card and `generation_config.json` into a merged checkpoint's folder.

    settings: the model's own GenerationConfig, which is left as it is.
    adapter:  what is known of what was trained: figures, data, licence.
    """
    own = copy.deepcopy(settings)
    own.suppress_tokens = banned_ids(checkpoint)
    own.eos_token_id = sorted(eos_ids)
    own.save_pretrained(folder)
    card = model_card(checkpoint, adapter, banned=banned_ids(checkpoint), gguf_key=SUPPRESS_TOKENS)
    (folder / CARD).write_text(card, encoding="utf-8")
    (folder / RECIPE).mkdir()
    (folder / RECIPE / "generate.py").write_text(_GENERATE, encoding="utf-8")
    (folder / RECIPE / "requirements.txt").write_text("pasta-decoding\n", encoding="utf-8")


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


_GENERATE = """\
# How transformers has this model write the independent parts of an answer at the same time.

from pasta_decoding import generate

__all__ = ["generate"]
"""
