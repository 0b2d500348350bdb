"""transformers' `generate`, answered in parallel, for what `pasta export --to hf` wrote.

    model.generate(**inputs, max_new_tokens=300, custom_generate=pasta.generate)
    pasta.generate(model, **inputs, max_new_tokens=300, streamer=streamer)

transformers reads and checks the arguments; those that Pasta cannot honour are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pasta_decoding.answer.request import Rules
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.api.model import Model
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import ChunkRun, MainRun

if TYPE_CHECKING:
    from pasta_decoding.answer.record import Answer
    from pasta_decoding.models.load import LoadedModel
    from pasta_decoding.scheduling.decoder import LocalDecoder

_UNDERSTOOD = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor", "SuppressTokensLogitsProcessor",
    "MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria",
}  # fmt: skip
_ASKED_FOR = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_SEEDS = 2**31
_KEPT: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
"""What a model's decoder was made of, and the decoder without its engine, which holds the model."""


def generate(model: Any, inputs: Any = None, **arguments: Any) -> Any:
    """Answer in parallel what `model.generate` would answer sequentially; return its ids.

    It takes the arguments of transformers' `generate`, and may be its `custom_generate`. As that it
    gets no `streamer`, which then waits for ever, and no `stop_strings`: call it by itself for
    them, or name a folder.

    model:      loaded by transformers from a folder of `pasta export --to hf`. It is given
                Pasta's attention for the length of the call, and is left as it was.
    inputs:     [B, P] token ids, or `input_ids`; rows of one length.
    tokenizer:  the model's; read from its folder if left out.
    max_new_tokens: of each answer, its tags included, which are not returned.

    Returns [B, P + T] ids, prompt and plain text, shorter answers padded behind their end. With
    `return_dict_in_generate` a `ModelOutput` of them (`sequences`) and the `results`, one a row,
    which have the threads. Samples draw their seeds from torch's global generator.

    Raises PastaError for beams, padding, another base model, and options that have no meaning here.
    """
    if hasattr(arguments.get("generation_config"), "_eos_token_tensor"):  # by transformers itself
        return _decode(model, inputs, **arguments)
    for name in ("assistant_model", "inputs_embeds"):
        if arguments.get(name) is not None:
            raise PastaError(f"{name} has no meaning in parallel decoding")
    own = {name: arguments.pop(name, None) for name in ("stop_strings", "tokenizer")}
    streamer = arguments.get("streamer")

    def decode(_: Any, input_ids: Any, **prepared: Any) -> Any:
        return _decode(model, input_ids, **prepared | own | {"streamer": streamer})

    return model.generate(inputs, custom_generate=decode, **arguments)


def _decode(
    model: Any, inputs: Any, *, generation_config: Any, logits_processor: Any,
    stopping_criteria: Any, stop_strings: Any = None, streamer: Any = None, tokenizer: Any = None,
    **given: Any,
) -> Any:  # fmt: skip
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers.utils.generic import ModelOutput

    config = generation_config
    _refuse(config, [*logits_processor, *stopping_criteria], given)
    if streamer is not None and len(inputs) > 1:
        raise PastaError("a streamer shows one answer: give one prompt")
    limit = config.max_length - inputs.shape[1]
    try:
        with _decoder(model, tokenizer, config, inputs) as decoder, Model(decoder) as front:
            streams = [
                front.stream(row, _converted(config, limit, stop_strings))
                for row in inputs.tolist()
            ]
            for stream in streams:
                for n, text in enumerate(stream):
                    if streamer is not None:
                        streamer.put(torch.tensor(decoder.encoder.encode_text(text, behind=n > 0)))
    finally:
        if streamer is not None:
            streamer.end()
    padding = config.pad_token_id if config.pad_token_id is not None else decoder.vocabulary.end
    rows = [inputs.new_tensor(_plain_ids(decoder, one.answer)) for one in streams]
    behind = pad_sequence(rows, batch_first=True, padding_value=padding)
    sequences = torch.cat([inputs, behind], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    output: Any = ModelOutput(sequences=sequences)
    output["results"] = [one.result for one in streams]
    return output


def _refuse(config: Any, steps: Sequence[Any], given: dict[str, Any]) -> None:
    mode = config.get_generation_mode().value
    foreign = [type(step).__name__ for step in steps if type(step).__name__ not in _UNDERSTOOD]
    asked = [name for name in _ASKED_FOR if getattr(config, name, None)]
    cache = given.get("past_key_values")
    if mode not in ("greedy_search", "sample"):
        mode = mode.replace("_", " ")
        raise PastaError(f"{mode} cannot be done in parallel: use num_beams=1 and no lookup")
    if foreign:
        raise PastaError(f"{', '.join(foreign)} is not applied in parallel decoding")
    if asked:
        raise PastaError(f"{', '.join(asked)} is not returned by parallel decoding")
    if given.get("attention_mask") is not None:  # one of ones alone is dropped before
        raise PastaError("rows of different lengths: use `pasta.load(...).batch(...)`")
    if cache is not None and cache.get_seq_length():
        raise PastaError("it cannot go on from past_key_values: give the whole prompt")


def _converted(config: Any, max_tokens: int, stops: Any) -> GenerationConfig:
    """Return transformers' settings as ours. Samples take their seed from torch's generator."""
    import torch

    sampling: dict[str, Any] = {}
    if config.do_sample:
        sampling = {name: getattr(config, name) for name in ("temperature", "top_p", "min_p")}
        sampling = {"temperature": 1.0} | {k: v for k, v in sampling.items() if v is not None}
        sampling |= {"top_k": config.top_k or None, "seed": int(torch.randint(_SEEDS, ()))}
    return GenerationConfig(
        max_tokens=max_tokens,
        max_seconds=config.max_time,
        stop=stops,
        repetition_penalty=config.repetition_penalty or 1.0,
        **sampling,
    )


@contextmanager
def _decoder(model: Any, tokenizer: Any, config: Any, inputs: Any) -> Iterator[LocalDecoder]:
    from pasta_decoding.engines.torch import TorchEngine
    from pasta_decoding.scheduling.decoder import decoder_over

    made_of = (model.name_or_path, tokenizer, config.eos_token_id)
    known, kept = _KEPT.get(model, (None, None))
    loaded = None if known == made_of else _loaded(model, tokenizer, config)
    control = kept.vocabulary.control if loaded is None else loaded.checkpoint.control
    if others := set(config.suppress_tokens or ()) - control.ids:
        raise PastaError(f"suppress_tokens {min(others)} is not applied in parallel decoding")
    attention = model.config._attn_implementation
    trained = [(module, module.training) for module in model.modules()]
    tokens = 2 * len(inputs) * config.max_length + Rules().max_chunks  # enough for a text join
    try:
        engine = TorchEngine(model, cache_tokens=tokens)
        decoder = replace(kept, engine=engine) if loaded is None else decoder_over(engine, loaded)
        _KEPT[model] = made_of, replace(decoder, engine=None)
        yield decoder
    finally:
        model.set_attn_implementation(attention)
        for module, training in trained:
            module.training = training


def _loaded(model: Any, tokenizer: Any, config: Any) -> LoadedModel:
    """Return a model of transformers as one of ours, if `pasta export` wrote it."""
    from transformers.utils.hub import cached_file

    from pasta_decoding.models import checkpoint as checkpoints
    from pasta_decoding.models.checkpoint import read_checkpoint
    from pasta_decoding.models.load import checked, eos_ids
    from pasta_decoding.models.pretrained import load_tokenizer

    name = model.name_or_path
    found = cached_file(
        name, checkpoints.FILE_NAME,
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
    ) if name else None  # fmt: skip
    if found is None:
        raise PastaError(
            f"{name or 'this model'} was not trained to decode in parallel: it has no pasta.json",
            hint="Load what `pasta export --to hf` wrote.",
        )
    folder = Path(found).parent
    tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
    ends = eos_ids(config.eos_token_id, tokenizer)
    return checked(model, tokenizer, ends, read_checkpoint(folder), name)


def _plain_ids(decoder: LocalDecoder, answer: Answer) -> list[int]:
    """Return the tokens that a reader sees, in reading order, and the end if the model wrote it."""
    control = decoder.vocabulary.control.ids
    texts = [one.ids for one in answer.segments if isinstance(one, MainRun | ChunkRun)]
    ids = [token for text in texts for token in text if token not in control]
    return ids if answer.end is None else [*ids, answer.end]
