"""The methods `hf` and `lookup`: transformers' own `generate`, one answer at a time.

`hf` is a sequential baseline. `lookup` is prompt lookup decoding (Saxena 2023): if the last two
tokens stood in the text before, it drafts the tokens that followed them there, and one forward pass
verifies the draft.
"""

from copy import deepcopy
from dataclasses import asdict
from itertools import chain
from typing import Any

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import Question
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.evaluation.ask import Ask, question_sampling
from pasta_decoding.evaluation.records import Record
from pasta_decoding.lang.tree import Span, text_form
from pasta_decoding.scheduling.asking import DecodingTask
from pasta_decoding.scheduling.decoder import LocalDecoder

LOOKUP_TOKENS = 10
"""How many tokens prompt lookup drafts at most; the default of transformers."""


def unpatched_model(decoder: LocalDecoder) -> Any:
    """Return the model of a torch engine as transformers made it. It shares the weights."""
    assert isinstance(decoder.engine, TorchEngine), "made for this engine"
    model = decoder.engine.model
    weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    copied_model = deepcopy(model, memo=weights)  # objects in `memo` are not copied
    copied_model.set_attn_implementation("sdpa")
    return copied_model


def ask_transformers(
    decoder: LocalDecoder,
    model: Any,
    lookup_tokens: int | None,
    config: GenerationConfig,
    question: Question,
    _ask: Ask,
) -> DecodingTask[Record]:
    """Answer by `generate` of transformers. It blocks until the answer is complete.

    model:         from `unpatched_model`, on the device where it computes.
    lookup_tokens: how many tokens prompt lookup drafts at most; None decodes without drafts.
    """
    import torch

    yield from ()
    prompt = decoder.prompt_ids(question.instruction, config.max_tokens)
    sampling = question_sampling(config, question)
    settings = _generation_settings(decoder, config, lookup_tokens)
    forward_passes: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: forward_passes.append(None))
    input_ids = torch.tensor([prompt], device=model.device)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(sampling.seed)
            output_ids = model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings
            )
    finally:
        hook.remove()
    answer_ids = output_ids[0, len(prompt) :].tolist()
    text = decoder.vocabulary.decode(answer_ids)
    return Record(
        **asdict(question),
        text=text,
        annotated=text_form((Span(text),)) if text else "",
        plain_tokens=decoder.plain_tokens(text),
        critical_path=len(forward_passes) - 1,  # the first one is the prefill
        fed_tokens=len(answer_ids),
        hit_limit=answer_ids[-1] not in decoder.vocabulary.eos_ids,
    )


def _generation_settings(
    decoder: LocalDecoder, config: GenerationConfig, lookup_tokens: int | None
) -> Any:
    """Return the `GenerationConfig` of transformers that asks for the same as `config`."""
    from transformers import GenerationConfig as HfConfig

    sampling = config.sampling()
    settings = HfConfig(
        do_sample=not sampling.greedy,
        max_new_tokens=config.max_tokens,
        eos_token_id=sorted(decoder.vocabulary.eos_ids),
        pad_token_id=decoder.vocabulary.end,
        prompt_lookup_num_tokens=lookup_tokens,
    )
    if not sampling.greedy:
        settings.temperature = sampling.temperature
        settings.top_p = sampling.top_p
        settings.top_k = 0  # off; 50 by default
    return settings
