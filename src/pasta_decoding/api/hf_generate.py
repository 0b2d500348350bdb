"""transformers' `generate`, answered in parallel, for folders that `pasta export --to hf` wrote.

    model.generate(**inputs, max_new_tokens=300, custom_generate=pasta.generate)
    pasta.generate(model, **inputs, max_new_tokens=300, streamer=streamer)

transformers reads and checks the arguments. Pasta refuses those that it cannot honour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pasta_decoding.answer.settings import Rules
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.api.model import Model
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import ChunkRun, MainRun

if TYPE_CHECKING:
    from pasta_decoding.answer.record import Answer
    from pasta_decoding.models.load import LoadedModel
    from pasta_decoding.scheduling.decoder import LocalDecoder

_SUPPORTED_STEPS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "MaxLengthCriteria",
    "EosTokenCriteria",
    "MaxTimeCriteria",
}
"""Processors and criteria of transformers whose settings `_converted` passes on."""
_EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_SEEDS = 2**31
_DECODERS: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
"""By model: what its decoder was made of, and the decoder without its engine, which has the model.

With the engine, the model would never be freed.
"""


def generate(model: Any, inputs: Any = None, **arguments: Any) -> Any:
    """Answer in parallel what `model.generate` would answer sequentially; return its ids.

    It takes the arguments of transformers' `generate`. It may also be the `custom_generate` of that
    function; then it gets no `stop_strings` and no `streamer`, and a streamer's reader would wait
    for ever. For these two, call `pasta.generate` itself, or give `custom_generate` a folder.

    model:      loaded by transformers from a folder of `pasta export --to hf`. During the call it
                has Pasta's attention; afterwards it is as before.
    inputs:     [B, P] token ids, or `input_ids`; all rows have one length.
    tokenizer:  the model's; read from its folder if left out.
    max_new_tokens: limit of each answer. It counts tags, which are not returned.

    Returns [B, P + T] ids: prompt and plain text, shorter answers padded at their end. With
    `return_dict_in_generate`, returns a `ModelOutput` of these `sequences` and of the `results`,
    which have the threads, one for each row. Seeds of samples come from torch's global generator.

    Raises PastaError for beams, padding, another base model, and options that have no meaning here.
    """
    if hasattr(arguments.get("generation_config"), "_eos_token_tensor"):  # by transformers itself
        return _decode(model, inputs, **arguments)
    for name in ("assistant_model", "inputs_embeds"):
        if arguments.get(name) is not None:
            raise PastaError(f"{name} has no meaning in parallel decoding")
    # transformers would not pass these three on.
    overrides = {
        "stop_strings": arguments.pop("stop_strings", None),
        "tokenizer": arguments.pop("tokenizer", None),
        "streamer": arguments.get("streamer"),
    }

    def decode(_: Any, input_ids: Any, **prepared: Any) -> Any:
        return _decode(model, input_ids, **prepared | overrides)

    return model.generate(inputs, custom_generate=decode, **arguments)


def _decode(
    model: Any,
    inputs: Any,
    *,
    generation_config: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    stop_strings: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **model_arguments: Any,
) -> Any:
    """Answer each row of `inputs`; the arguments are those that transformers prepared."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers.utils.generic import ModelOutput

    config = generation_config
    _refuse(config, [*logits_processor, *stopping_criteria], model_arguments)
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
                for index, text in enumerate(stream):
                    if streamer is not None:
                        ids = decoder.encoder.encode_text(text, continues=index > 0)
                        streamer.put(torch.tensor(ids))
    finally:
        if streamer is not None:
            streamer.end()
    padding = config.pad_token_id if config.pad_token_id is not None else decoder.vocabulary.end
    rows = [inputs.new_tensor(_plain_ids(decoder, stream.answer)) for stream in streams]
    answers_BT = pad_sequence(rows, batch_first=True, padding_value=padding)
    sequences = torch.cat([inputs, answers_BT], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    output: Any = ModelOutput(sequences=sequences)
    output["results"] = [stream.result for stream in streams]
    return output


def _refuse(config: Any, steps: Sequence[Any], model_arguments: dict[str, Any]) -> None:
    """Raise PastaError for what parallel decoding cannot do. `steps`: processors and criteria."""
    mode = config.get_generation_mode().value
    names = [type(step).__name__ for step in steps]
    foreign = [name for name in names if name not in _SUPPORTED_STEPS]
    extra_outputs = [name for name in _EXTRA_OUTPUTS if getattr(config, name, None)]
    cache = model_arguments.get("past_key_values")
    if mode not in ("greedy_search", "sample"):
        mode = mode.replace("_", " ")
        raise PastaError(f"{mode} cannot be done in parallel: use num_beams=1 and no lookup")
    if foreign:
        raise PastaError(f"{', '.join(foreign)} is not applied in parallel decoding")
    if extra_outputs:
        raise PastaError(f"{', '.join(extra_outputs)} is not returned by parallel decoding")
    # transformers drops a mask that is all ones.
    if model_arguments.get("attention_mask") is not None:
        raise PastaError("rows of different lengths: use `pasta.load(...).batch(...)`")
    if cache is not None and cache.get_seq_length():
        raise PastaError("it cannot go on from past_key_values: give the whole prompt")


def _converted(config: Any, max_tokens: int, stops: Any) -> GenerationConfig:
    """Return transformers' settings as ours. Samples take their seed from torch's generator."""
    import torch

    sampling: dict[str, Any] = {}
    if config.do_sample:
        sampling["temperature"] = 1.0
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(config, name)
            if value is not None:
                sampling[name] = value
        sampling["top_k"] = config.top_k or None
        sampling["seed"] = int(torch.randint(_SEEDS, ()))
    return GenerationConfig(
        max_tokens=max_tokens,
        max_seconds=config.max_time,
        stop=stops,
        repetition_penalty=config.repetition_penalty or 1.0,
        **sampling,
    )


@contextmanager
def _decoder(model: Any, tokenizer: Any, config: Any, inputs: Any) -> Iterator[LocalDecoder]:
    """Put the model on a torch engine for the block; leave it as it was."""
    from pasta_decoding.engines.torch import TorchEngine
    from pasta_decoding.scheduling.decoder import decoder_over

    key = (model.name_or_path, tokenizer, config.eos_token_id)
    cached_key, cached_decoder = _DECODERS.get(model, (None, None))
    if cached_decoder is not None and cached_key == key:
        loaded = None
        control = cached_decoder.vocabulary.control
    else:
        loaded = _loaded(model, tokenizer, config)
        control = loaded.checkpoint.control
    foreign_ids = set(config.suppress_tokens or ()) - control.ids
    if foreign_ids:
        raise PastaError(f"suppress_tokens {min(foreign_ids)} is not applied in parallel decoding")
    attention = model.config._attn_implementation
    training_modes = [(module, module.training) for module in model.modules()]
    cache_tokens = 2 * len(inputs) * config.max_length + Rules().max_chunks  # fits a text join
    try:
        engine = TorchEngine(model, cache_tokens=cache_tokens)
        if loaded is None:
            decoder = replace(cached_decoder, engine=engine)
        else:
            decoder = decoder_over(engine, loaded)
            _DECODERS[model] = (key, replace(decoder, engine=None))  # type: ignore[arg-type]
        yield decoder
    finally:
        model.set_attn_implementation(attention)
        for module, training in training_modes:
            module.training = training


def _loaded(model: Any, tokenizer: Any, config: Any) -> LoadedModel:
    """Return a model of transformers as one of ours, if `pasta export` wrote it."""
    from transformers.utils.hub import cached_file

    from pasta_decoding.models import checkpoint as checkpoints
    from pasta_decoding.models.checkpoint import read_checkpoint
    from pasta_decoding.models.load import eos_ids, matched_model
    from pasta_decoding.models.pretrained import load_tokenizer

    name = model.name_or_path
    path = None
    if name:
        path = cached_file(
            name,
            checkpoints.FILE_NAME,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if path is None:
        raise PastaError(
            f"{name or 'this model'} was not trained to decode in parallel: it has no pasta.json",
            hint="Load what `pasta export --to hf` wrote.",
        )
    folder = Path(path).parent
    tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
    ends = eos_ids(config.eos_token_id, tokenizer)
    return matched_model(model, tokenizer, ends, read_checkpoint(folder), name)


def _plain_ids(decoder: LocalDecoder, answer: Answer) -> list[int]:
    """Return the visible tokens in reading order, and the end token if the model wrote it."""
    control_ids = decoder.vocabulary.control.ids
    ids: list[int] = []
    for segment in answer.segments:
        if isinstance(segment, MainRun | ChunkRun):
            ids += [token for token in segment.ids if token not in control_ids]
    return ids if answer.end is None else [*ids, answer.end]
