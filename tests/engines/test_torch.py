"""What the torch engine promises beyond the contract: memory, work, and which models it runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from pasta_decoding.engines import torch as torch_engine
from pasta_decoding.engines.base import Feed
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from tests.engines.oracle import TOLERANCE, Recorder, assert_equals_recompute, dense
from tests.engines.subjects import padded
from tests.tiny import tiny_llama, tiny_qwen3

PROMPT = (5, 17, 42, 8)


def fork_join_go_on(record: Recorder) -> None:
    main = record.open(PROMPT)
    child = record.fork(main)
    other = record.fork(main)
    record.step(Feed((main, child), (90,), (4,)), Feed((child,), (91,), (5,)))
    record.step(*(Feed((branch,), (20,), (6,)) for branch in (main, child, other)))
    record.join(main, [child, other])
    record.step(Feed((main,), (30, 31), (7, 8)))
    record.close(main)


# --- work and memory ----------------------------------------------------------------------------


def watched(model: PreTrainedModel) -> tuple[list[list[int]], list[int]]:
    """Return lists that each pass adds to: its token ids, and how many rows its head computes."""
    computed: list[list[int]] = []
    rows: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook
    hook(lambda _, arguments: computed.append(arguments[0].flatten().tolist()))
    hook = model.get_output_embeddings().register_forward_pre_hook
    hook(lambda _, arguments: rows.append(arguments[0].shape[1]))
    return computed, rows


def test_a_step_is_one_pass_that_computes_each_token_once_and_the_rows_that_are_wanted() -> None:
    model = tiny_llama()
    engine = TorchEngine(model)
    computed, rows = watched(model)
    record = Recorder(engine)
    fork_join_go_on(record)
    assert [token for pass_ids in computed for token in pass_ids] == record.ids
    assert rows == [1, 2, 3, 1]
    branches = [engine.open(reserved_tokens=8) for _ in range(3)]
    engine.step(
        [
            Feed((branches[0],), PROMPT, (0, 1, 2, 3)),
            Feed((branches[1],), PROMPT, (0, 1, 2, 3), wants_logits=False),
            Feed((branches[2],), PROMPT, (0, 1, 2, 3)),
        ]
    )
    assert (len(computed), rows[4:]) == (5, [2])


def test_requests_that_do_not_fit_beside_each_other_wait_their_turn() -> None:
    engine = TorchEngine(tiny_llama(), cache_tokens=100)
    first = engine.open(reserved_tokens=40)
    second = engine.open(reserved_tokens=40)
    engine.close(first)
    message = r"50 tokens in one piece: the widest gap .* 100 slots is 40"
    with pytest.raises(PastaError, match=message):
        engine.open(reserved_tokens=50)
    third = engine.open(reserved_tokens=40)
    engine.close(second)
    fourth = engine.open(reserved_tokens=60)  # where the second was
    for branch in (third, fourth):
        engine.close(branch)
    engine.close(engine.open(reserved_tokens=100))


def test_padded_passes_have_few_sizes() -> None:
    model = tiny_llama()
    engine = padded(model, cache_tokens=1100)
    computed, rows = watched(model)
    main = engine.open(reserved_tokens=1100)
    start = 0
    for length in (1, 3, 65, 257, 700):
        positions = tuple(position % 500 for position in range(start, start + length))
        engine.step([Feed((main,), (1,) * length, positions)])
        start += length
    assert [*map(len, computed)] == [1, 4, 96, 384, 512, 192]  # the last step takes two passes
    assert rows == [1] * 6


def test_a_step_of_several_padded_passes_equals_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "LISTS_NUMBERS", 4)  # more lists take more
    record = Recorder(padded(tiny_llama()))
    prompt = tuple(number % 90 for number in range(300))
    first = record.engine.open(reserved_tokens=1)
    others = [record.open(PROMPT, room=700) for _ in range(2)]
    record.close(first)
    child = record.fork(others[1])
    feeds = [Feed((branch,), prompt, tuple(range(4, 304))) for branch in (*others, child)]
    record.step(*feeds, Feed((others[0],), (7,), (304,)))
    assert_equals_recompute(record, dense(tiny_llama()))


# --- exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_a_model_taken_over_still_answers_a_plain_padded_call(
    make: Callable[[], PreTrainedModel],
) -> None:
    taken = make()
    TorchEngine(taken)
    ids = torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6]])
    mask = torch.tensor([[1] * 4, [0, 0, 1, 1]])
    with torch.no_grad():
        logits = taken(ids, attention_mask=mask).logits
        expected = make()(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=TOLERANCE)


# --- refusals -----------------------------------------------------------------------------------

NO_ROPE = "it has no rotary positions (RoPE)"
RECURRENT = "it has recurrent layers, whose state cannot be forked and joined"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_embd": 32, "n_layer": 1, "n_head": 4}, NO_ROPE),
    "falcon": ({"hidden_size": 32, "num_attention_heads": 4, "alibi": True}, NO_ROPE),
    "gemma2": (SMALL, "its attention caps its scores"),
    "gpt_oss": (SMALL | {"head_dim": 8}, "its attention has sinks"),
    "llama4_text": (
        SMALL | {"num_local_experts": 1, "intermediate_size_mlp": 64},
        "its attention is neither full nor a sliding window but chunked_attention",
    ),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 1}, RECURRENT),
    "jamba": (SMALL | {"num_experts": 2}, RECURRENT),
    "t5": ({"d_model": 32, "num_layers": 1}, "it is an encoder-decoder"),
    "llama": (
        SMALL | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "its rotary positions (dynamic) change with the length",
    ),
}


def on_no_device(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        if config.is_encoder_decoder:
            return AutoModelForSeq2SeqLM.from_config(config)
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_run_exactly_is_refused_by_name(kind: str) -> None:
    settings, reason = REFUSED[kind]
    with pytest.raises(PastaError) as error:
        TorchEngine(on_no_device(kind, settings))
    assert str(error.value) == f"the torch engine cannot run this {kind} model: {reason}"
