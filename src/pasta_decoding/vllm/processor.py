"""What vLLM sees: one class for both of its model runners."""

from typing import Any

import vllm
from torch import Tensor
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import LogitsProcessor as MovingRows

from pasta_decoding.errors import PastaError
from pasta_decoding.vllm.batch import GuidedRows, GuidedSlots, ServedModel, guided_params_of

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as FixedSlots
except ImportError:  # there was a time when it had one runner
    FixedSlots = object

VLLM_VERSION = "0.32"


class PastaLogitsProcessor(MovingRows, FixedSlots):  # type: ignore[misc]
    """Lets guided requests write only what their thread may; see vLLM's `LogitsProcessor`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse params that are none. Raises ValueError, which vLLM answers with 400."""
        try:
            params = guided_params_of(sampling_params)
        except PastaError as error:
            raise ValueError(f"pasta-decoding: {error}") from None
        if params is not None and not vllm.__version__.startswith(f"{VLLM_VERSION}."):
            known = f"its logits processor knows vLLM {VLLM_VERSION}"
            raise ValueError(f"pasta-decoding: {known}, and this is {vllm.__version__}")

    def __init__(self, vllm_config: Any, where: Any, _pins_memory: bool | None = None) -> None:
        """Begin with no request. `where` is a device, or the second runner's states."""
        model = vllm_config.model_config
        served = ServedModel(cached_tokenizer_from_config(model), model.get_vocab_size())
        self._places, self._slots = GuidedRows(served), GuidedSlots(served, where)

    def is_argmax_invariant(self) -> bool:
        """No: what may not stand there is often what the model would like best."""
        return False

    def update_state(self, batch_update: Any) -> None:
        self._places.update(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return self._slots.add(req_idx, sampling_params)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        return self._places.apply(logits) if ctx is None else self._slots.apply(logits, ctx)
