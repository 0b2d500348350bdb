"""The logits processor that vLLM loads: one class for both of its model runners."""

from typing import Any

import vllm
from torch import Tensor
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import LogitsProcessor as MovingRows

from pasta_decoding.errors import PastaError
from pasta_decoding.vllm.batch import GuidedRows, GuidedSlots, ServedModel, guided_params_of

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as FixedSlots
except ImportError:  # older versions have one runner
    FixedSlots = object

VLLM_VERSION = "0.32"


class PastaLogitsProcessor(MovingRows, FixedSlots):  # type: ignore[misc]
    """Lets guided requests write only what their thread may; see vLLM's `LogitsProcessor`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for guided params that cannot be read. vLLM answers it with 400."""
        try:
            params = guided_params_of(sampling_params)
        except PastaError as error:
            raise ValueError(f"pasta-decoding: {error}") from None
        if params is not None and not vllm.__version__.startswith(f"{VLLM_VERSION}."):
            message = f"its logits processor knows vLLM {VLLM_VERSION}, and this is"
            raise ValueError(f"pasta-decoding: {message} {vllm.__version__}")

    def __init__(
        self, vllm_config: Any, device_or_states: Any, _pins_memory: bool | None = None
    ) -> None:
        """Make a processor without requests: the first runner gives a device, the second states."""
        config = vllm_config.model_config
        model = ServedModel(cached_tokenizer_from_config(config), config.get_vocab_size())
        self._rows = GuidedRows(model)
        self._slots = GuidedSlots(model, device_or_states)

    def is_argmax_invariant(self) -> bool:
        """Return False: a guide may ban the likeliest token."""
        return False

    def update_state(self, batch_update: Any) -> None:
        self._rows.update(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return self._slots.add(req_idx, sampling_params)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Restrict the logits in place. Only the second runner has a context."""
        return self._rows.apply(logits) if ctx is None else self._slots.apply(logits, ctx)
