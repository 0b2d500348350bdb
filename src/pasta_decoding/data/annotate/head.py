"""A reading head: what a base model's hidden states say about the units of a response.

The model stays as it is. Behind each unit its hidden states know what was read; a linear map of
those behind the unit before, the unit itself and the unit behind it, and of their mean over the
response, tells whether a careful reader would begin a chunk with the unit, go on with one, or leave
it in the main thread. A head fits the one base model that it was trained on (train/head.py).

Shapes: U units, D width of the hidden states that are read (those of all layers read, in a row).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pasta_decoding.data.annotate.prior import Facts, Seen
from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole

LABELS = ("main", "first", "further")
FORMAT_VERSION = 1
SHIPPED = Path(__file__).with_name("heads")


@dataclass(frozen=True, slots=True)
class Head:
    """A linear map to three log-odds, and the weights of a candidate's facts beside it.

    base:     digest of the base model that it reads (`Base.norms_sha256`).
    layers:   whose outputs are read; 0 is what the embeddings give.
    mean_F, scale_F: of its inputs, as `unit_inputs` gives them (F = 4 D).
    weight_F3, bias_3: the map.
    weights:  log-odds for each fact of a candidate.
    """

    base: str
    layers: tuple[int, ...]
    mean_F: Tensor
    scale_F: Tensor
    weight_F3: Tensor
    bias_3: Tensor
    weights: Facts

    @property
    def digest(self) -> str:
        """Return what tells it from other heads."""
        about = json.dumps([self.base, self.layers, asdict(self.weights)]).encode()
        map_3 = self.weight_F3.numpy().tobytes() + self.bias_3.numpy().tobytes()
        return hashlib.sha256(about + map_3).hexdigest()[:16]

    def see(self, states_VD: Tensor) -> list[Seen]:
        """Return what it says of each unit; for the states see `unit_inputs`."""
        inputs_UF = (unit_inputs(states_VD) - self.mean_F) / self.scale_F
        logprobs_U3 = (inputs_UF @ self.weight_F3 + self.bias_3).log_softmax(-1)
        return [Seen(*logprobs_3) for logprobs_3 in logprobs_U3.tolist()]


def unit_inputs(states_VD: Tensor) -> Tensor:
    """Return inputs_UF: for each unit the states before it, of it, behind it, and all units' mean.

    states_VD: behind the prompt, then behind each unit (V = U + 1), float32.
    """
    before_UD, own_UD = states_VD[:-1], states_VD[1:]
    behind_UD = torch.cat([own_UD[1:], torch.zeros_like(own_UD[:1])])
    mean_UD = own_UD.mean(0, keepdim=True).expand_as(own_UD)
    return torch.cat([before_UD, own_UD, behind_UD, mean_UD], dim=1)


def save_head(head: Head, path: Path) -> None:
    """Write a head to one file, whole or not at all. Raises PastaError where there is no room."""
    names = ("mean_F", "scale_F", "weight_F3", "bias_3")
    tensors = {name: getattr(head, name).contiguous() for name in names}
    about = {
        "format_version": FORMAT_VERSION,
        "base": head.base,
        "layers": head.layers,
        "weights": asdict(head.weights),
    }
    try:
        with written_whole(path) as partial:
            save_file(tensors, partial, metadata={"pasta": json.dumps(about)})
    except SafetensorError as error:
        raise PastaError(f"cannot write {path}: {error}") from error


def load_head(path: Path) -> Head:
    """Read a head. Raises PastaError if it is missing, broken or of another version."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["pasta"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {about['format_version']}, not {FORMAT_VERSION}")
        layers, weights = tuple(about["layers"]), Facts(**about["weights"])
        return Head(base=about["base"], layers=layers, weights=weights, **tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        message = f"{path} is no reading head: {error}"
        raise PastaError(message, hint="Train one with `pasta train head`.") from error


def shipped_head(base: str) -> Head | None:
    """Return the head that ships for the base model with this digest, if there is one."""
    heads = (load_head(path) for path in sorted(SHIPPED.glob("*.safetensors")))
    return next((head for head in heads if head.base == base), None)
