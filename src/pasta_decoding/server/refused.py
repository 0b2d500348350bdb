"""Fields of other servers that would change the answer and are not obeyed here: never passed over.

OpenAI's, vLLM's, SGLang's, TGI's, llama.cpp's and Ollama's. Others that are not known do no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is refused, and the values that say what is done without it anyway."""

    why: str
    neutral: tuple[Any, ...] = ()


_FORM = Refused("an answer is free text in several threads, which no form can hold together")
_NO_TOOLS = "the models here were not taught to call any"
_LENGTH = Refused("use max_tokens", (-1,))
_IDS = Refused("ids that end or begin an answer are the model's own; stop takes texts")
_SAMPLING = "of the samplers there are temperature, top_p, top_k, min_p and penalties"
_TEMPLATE = Refused("the model's own chat template is used, as it was trained")

REFUSED: Mapping[str, Refused] = {
    "add_generation_prompt": Refused(_TEMPLATE.why, (True,)),
    "allowed_token_ids": Refused("logit_bias can ban tokens one by one"),
    "audio": Refused("there is text alone"),
    "bad_words": Refused("logit_bias can ban tokens one by one"),
    "best_of": Refused("all answers are shown: use n", (1,)),
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "continue_final_message": _TEMPLATE,
    "documents": _TEMPLATE,
    "do_sample": Refused("use temperature", (True,)),
    "dry_multiplier": Refused(_SAMPLING),
    "dynatemp_range": Refused(_SAMPLING),
    "ebnf": _FORM,
    "echo": Refused("the prompt is not repeated"),
    "format": _FORM,
    "function_call": Refused(_NO_TOOLS, ("none", "auto")),
    "functions": Refused(_NO_TOOLS),
    "grammar": _FORM,
    "guided_choice": _FORM,
    "guided_grammar": _FORM,
    "guided_json": _FORM,
    "guided_regex": _FORM,
    "ignore_eos": _IDS,
    "include_stop_str_in_output": Refused("the text ends before a stop"),
    "json_schema": _FORM,
    "length_penalty": Refused("there is no beam search", (1,)),
    "logits_processors": Refused("there is logit_bias"),
    "lora": Refused("the server has one adapter"),
    "max_new_tokens": _LENGTH,
    "min_new_tokens": _IDS,
    "min_tokens": _IDS,
    "mirostat": Refused(_SAMPLING),
    "modalities": Refused("there is text alone", (["text"],)),
    "n_predict": _LENGTH,
    "n_probs": Refused("use logprobs"),
    "num_predict": _LENGTH,
    "options": Refused("give temperature, top_p and the others by themselves, as OpenAI has them"),
    "prompt_logprobs": Refused("logprobs tells those of the answer alone"),
    "regex": _FORM,
    "repeat_penalty": Refused("use repetition_penalty", (1,)),
    "response_format": Refused(_FORM.why, ({"type": "text"},)),
    "samplers": Refused(_SAMPLING),
    "skip_special_tokens": Refused("special tokens are no text", (True, None)),
    "stop_regex": Refused("use stop, which takes plain texts"),
    "stop_sequences": Refused("use stop"),
    "stop_token_ids": _IDS,
    "structural_tag": _FORM,
    "structured_outputs": _FORM,
    "suffix": Refused("the models here were not taught to fill in"),
    "tfs_z": Refused(_SAMPLING, (1,)),
    "tool_choice": Refused(_NO_TOOLS, ("none", "auto")),
    "tools": Refused(_NO_TOOLS),
    "top_n_sigma": Refused(_SAMPLING, (-1,)),
    "truncate_prompt_tokens": Refused("a prompt that is too long is an error"),
    "typical_p": Refused(_SAMPLING, (1,)),
    "use_beam_search": Refused("there is no beam search"),
    "watermark": Refused("there is none"),
    "xtc_probability": Refused(_SAMPLING),
}
"""An empty value (null, 0, false, "", [], {}) is fine for each that has no false neutral value."""

_TRUE_BY_DEFAULT = frozenset({"add_generation_prompt", "do_sample", "skip_special_tokens"})


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise the error for the first field that would have changed the answer."""
    for name, value in body.items():
        known = REFUSED.get(name) if isinstance(name, str) else None
        if known is None or _is_empty(name, value) or value in known.neutral:
            continue
        raise refusal(name, known.why)


def refusal(name: str, why: str) -> PydanticCustomError:
    """Return the error for a field that is not obeyed."""
    return PydanticCustomError(
        "unsupported", "{name} is not supported: {why}", {"name": name, "why": why, "param": name}
    )


def _is_empty(name: str, value: object) -> bool:
    return value is None or (not value and name not in _TRUE_BY_DEFAULT)
