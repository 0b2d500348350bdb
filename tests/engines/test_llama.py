"""What the llama engine promises beyond the contract: no leak, no token twice, clear refusals."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from pasta_decoding.engines.base import Feed
from pasta_decoding.engines.llama import MAX_SEQUENCES, LlamaEngine
from pasta_decoding.errors import PastaError
from pasta_decoding.models.gguf_writer import write_gguf
from tests.engines.oracle import Recorder
from tests.engines.subjects import speaking
from tests.engines.test_contract import run
from tests.tiny import VOCABULARY, tiny_llama

pytestmark = pytest.mark.llama
PROMPT = (5, 17, 42, 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(speaking(tiny_llama()), file, float_type="F32")
    return file


@pytest.fixture(scope="module")
def engine(path: Path) -> LlamaEngine:
    return LlamaEngine(path, cache_tokens=16384, threads=1, cache_type="F32")


def sequences_in_cache(engine: LlamaEngine) -> int:
    last_position = engine.library.llama_memory_seq_pos_max
    positions = [last_position(engine._memory, sequence) for sequence in range(MAX_SEQUENCES)]
    return sum(position >= 0 for position in positions)


def test_the_cache_is_empty_after_random_programs(engine: LlamaEngine) -> None:
    random = Random(0)
    for _ in range(200):
        program = [tuple(map(random.randrange, (8, VOCABULARY, 4))) for _ in range(12)]
        run(Recorder(engine), program)  # type: ignore[arg-type]
        assert engine.slots_in_use == sequences_in_cache(engine) == 0


def test_a_step_larger_than_a_batch_is_decoded_in_several(engine: LlamaEngine) -> None:
    ids = tuple(n % 90 for n in range(500))
    in_one_feed = engine.open(reserved_tokens=500)
    in_two_feeds = engine.open(reserved_tokens=500)
    logits_FV = engine.step(
        [
            Feed((in_one_feed,), ids, tuple(range(500))),
            Feed((in_two_feeds,), ids[:250], tuple(range(250)), wants_logits=False),
            Feed((in_two_feeds,), ids[250:], tuple(range(250, 500))),
        ]
    )
    np.testing.assert_allclose(logits_FV[0], logits_FV[1], rtol=0, atol=1e-4)
    engine.close(in_one_feed)
    engine.close(in_two_feeds)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PastaError, match=r"not a GGUF file that llama\.cpp can load"):
        LlamaEngine(tmp_path / "none.gguf")


def test_each_token_takes_one_cell_of_the_library(path: Path) -> None:
    """Fork, feed to two, join: a context of as many cells as tokens is enough, and no cell less."""
    exact = LlamaEngine(path, cache_tokens=256, threads=1, cache_type="F32")
    main = exact.open(reserved_tokens=256)
    exact.step([Feed((main,), (7,) * 100, tuple(range(100)))])
    children = [exact.fork(main) for _ in range(5)]
    exact.step([Feed((main, *children), (90,), (100,))])
    exact.step([Feed((child,), (8,) * 30, tuple(range(101, 131))) for child in children])
    exact.join(main, children)
    exact.step([Feed((main,), (9,) * 5, tuple(range(131, 136)))])
    assert exact.slots_in_use == 256
    batch = exact.library.llama_batch_init(1, 0, 1)
    batch.n_tokens = 1
    batch.token[0] = 7
    batch.pos[0] = 136
    batch.n_seq_id[0] = 1
    batch.seq_id[0][0] = 0
    assert exact.library.llama_decode(exact.context, batch) == 1  # it finds no cell
    exact.library.llama_batch_free(batch)
    exact.close(main)
