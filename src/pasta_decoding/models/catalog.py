"""Which model is this? From the words for an adapter and a model to files, and to names.

`resolve` is the one way from words to files. An adapter's word is the name of a shipped adapter, a
folder, a training run's folder, a name on the hub, or `none`. A model's word is the name of a known
base model, a folder, a GGUF file, or a name on the hub. Either may name a whole model, which has
its adapter in it; then the other word is left out.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.errors import PastaError
from pasta_decoding.files import sha256
from pasta_decoding.gguf_file import GgufFile
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL, BaseModel
from pasta_decoding.models.checkpoint import FILE_NAME, GGUF_KEY, from_json, read_checkpoint
from pasta_decoding.models.pull import download_from_hub, pulled_model

DEFAULT_ADAPTER = BASES[DEFAULT_MODEL].adapter
SEQUENTIAL = "sequential"
"""The baseline of a shipped adapter: trained on many of the same responses, tags taken out."""
NO_ADAPTER = "none"
"""The base model as it is, in place of an adapter's name."""
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = (_PACKAGE / "adapters", _PACKAGE.parents[1] / "adapters")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_RUN_FILES = ("metrics.jsonl", "prompts.jsonl")


@dataclass(frozen=True, slots=True)
class BaseWithAdapter:
    """A base model, and the folder of an adapter for it.

    weights: the base model's folder in Hugging Face's form, or its GGUF file.
    """

    weights: Path
    adapter: Path

    @property
    def checkpoint_path(self) -> Path:
        return self.adapter


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model that has its adapter in it: a merged folder with `pasta.json`, or a GGUF file.

    A GGUF file that another program wrote has no `pasta.json`; it is a base model.
    """

    weights: Path

    @property
    def checkpoint_path(self) -> Path:
        return self.weights


@dataclass(frozen=True, slots=True)
class BaseAlone:
    """A base model that answers sequentially: its folder, or its GGUF file."""

    weights: Path

    @property
    def checkpoint_path(self) -> None:
        return None


ModelSource = BaseWithAdapter | WholeModel | BaseAlone
"""The files of a model. `checkpoint_path` holds its `pasta.json`; None if there is none."""


def resolve(adapter: str | None, model: Path | None, cache: Path) -> ModelSource:
    """Return the files that the words name; fetch a known model or one on the hub, once.

    adapter: None is the adapter of a known base model, and none for another model.
    model:   None is the adapter's base model if that is known, else the default one.

    Raises PastaError for words that name nothing or that do not go together, and for a download
    that fails. The files may still be broken: loading looks into them.
    """
    whole_path = whole_model(adapter, model)
    if whole_path is not None:
        return WholeModel(whole_path)
    if adapter is not None and is_hub_name(Path(adapter)):
        return resolve(str(download_from_hub(adapter)), model, cache)
    name = adapter_name(adapter, model)
    folder = None if name == NO_ADAPTER else find_adapter(name)
    if folder is not None and holds_weights(folder):
        return WholeModel(folder)  # it has no `pasta.json`, as loading says
    base = find_base(model, cache, adapter=name)
    if model is not None and is_merged_folder(base):  # it came from the hub
        if adapter is not None:
            raise _named_twice(model)
        return WholeModel(base)
    return BaseAlone(base) if folder is None else BaseWithAdapter(base, folder)


def adapter_on(base: Path, adapter: Path) -> BaseWithAdapter | WholeModel:
    """Return the files of an adapter's folder with those of its base; a whole model needs none."""
    return WholeModel(adapter) if holds_weights(adapter) else BaseWithAdapter(base, adapter)


# Adapters


def find_adapter(name: str) -> Path:
    """Return the folder of an adapter, given as its folder, its training run's, or by name."""
    path = Path(name)
    if path.is_dir():
        for folder in (path, path / "adapter"):
            if (folder / FILE_NAME).is_file():
                return folder
        if any((path / file).is_file() for file in _RUN_FILES):
            raise PastaError(f"the training run in {path} is not finished: it holds no adapter yet")
        return path
    for shipped in _SHIPPED:
        if (shipped / name / FILE_NAME).is_file():
            return shipped / name
    raise PastaError(f"no adapter {name!r}; {', '.join(shipped_adapters())} ship, or give a folder")


def shipped_adapters() -> list[str]:
    """Return the names of the adapters that come with Pasta, the default one first."""
    names = {path.parent.name for shipped in _SHIPPED for path in shipped.glob(f"*/{FILE_NAME}")}
    return sorted(names, key=lambda name: (name != DEFAULT_ADAPTER, name))


def adapter_name(adapter: str | None, model: Path | None) -> str:
    """Return the name or folder of the adapter that the words mean, or `none`.

    Its folder is not looked for. With a whole model it has no meaning.
    """
    if adapter is not None:
        return adapter
    base = known_model(model)
    return NO_ADAPTER if base is None else base.adapter


def adapter_digest(path: Path) -> str:
    """Return 16 digits that tell an adapter, or a whole model, from all others."""
    if path.is_file():
        return sha256(path)[:16]
    digest = hashlib.sha256()
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.json")]):
        digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()[:16]


# Base models


def find_base(model: Path | None, cache: Path, *, adapter: str = NO_ADAPTER) -> Path:
    """Return a base model's folder or GGUF file, given as that, or by name; fetch it once.

    A known model comes into `cache`, unless HF_HUB_OFFLINE is set. `owner/name` comes from the hub
    into that client's own cache.

    model: None takes the adapter's, if that is known, or the default one.
    """
    if model is None:
        return pulled_model(cache, known_base_of(adapter))
    if known_model(model) is not None:
        return pulled_model(cache, str(model))
    return download_from_hub(model.as_posix()) if is_hub_name(model) else model


def known_model(model: Path | None) -> BaseModel | None:
    """Return the known base model of this name; the default one for None."""
    if model is None:
        return BASES[DEFAULT_MODEL]
    return None if model.exists() else BASES.get(str(model))


def known_base_of(adapter: str) -> str:
    """Return the name of the known base model that an adapter was trained on, or the default's."""
    name = base_name(None if adapter == NO_ADAPTER else find_adapter(adapter))
    return name if name in BASES else DEFAULT_MODEL


def base_name(checkpoint_path: Path | None) -> str:
    """Return the name of the base model that an adapter or a whole model was trained on.

    It is the short name of a known model, else what `pasta.json` says.
    """
    if checkpoint_path is None:
        return DEFAULT_MODEL
    if checkpoint_path.suffix == ".gguf":
        text = GgufFile(checkpoint_path).fields.get(GGUF_KEY)
        name = str(checkpoint_path) if text is None else from_json(text, "").base.name
    else:
        name = read_checkpoint(checkpoint_path).base.name
    return next((base.name for base in BASES.values() if base.hub == name), name)


def hub_name(model: Path | None) -> str:
    """Return the name of a base model on the hub; of a folder, the folder's own name."""
    if base := known_model(model):
        return base.hub
    assert model is not None, "None is a known model"
    return model.name if model.exists() else model.as_posix()


def is_hub_name(path: Path) -> bool:
    """Does it read as OWNER/NAME, where there is no such folder?"""
    return not path.exists() and _HUB_NAME.fullmatch(path.as_posix()) is not None


# Whole models


def whole_model(adapter: str | None, model: Path | None) -> Path | None:
    """Return the whole model that one of the words names; None if neither does.

    Raises PastaError if both words are there and one of them names a whole model. With an adapter,
    a GGUF file is the base model. Names on the hub are not looked up.
    """
    paths = [Path(word) for word in (model, adapter) if word is not None]
    whole_paths = [path for path in paths if is_whole(path)]
    if not whole_paths:
        return None
    if len(paths) == 1:
        return paths[0]
    if whole_paths == [model] and whole_paths[0].suffix == ".gguf":
        return None
    raise _named_twice(whole_paths[0])


def _named_twice(path: Path) -> PastaError:
    return PastaError(
        f"{path} is a whole model, adapter included: name it as --model or as --adapter, and "
        "leave the other out"
    )


def model_beside(adapter: str, model: Path | None) -> Path | None:
    """Return the base model to name with an adapter: `model`, and None for a whole model."""
    return None if is_whole(Path(adapter)) else model


def is_whole(path: Path) -> bool:
    """Is it a base model and an adapter in one: a GGUF, or a folder as `export --to hf` writes?"""
    return path.suffix == ".gguf" or is_merged_folder(path)


def is_merged_folder(path: Path) -> bool:
    return (path / FILE_NAME).is_file() and holds_weights(path)


def holds_weights(path: Path) -> bool:
    """Does the path hold all weights of a model, and not only what an adapter changes?"""
    if path.suffix == ".gguf":
        return True
    return (path / "config.json").exists() and not (path / "adapter_config.json").exists()


# What a checkpoint is called, and what it is compared with


def short_name(adapter: str | None, model: Path | None) -> str:
    """Return what a checkpoint is called in a line for people."""
    whole_path = whole_model(adapter, model)
    if whole_path is not None:
        return whole_path.name
    name = adapter_name(adapter, model)
    if name != NO_ADAPTER:
        return Path(name).name
    return DEFAULT_MODEL if model is None else model.name


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a checkpoint is compared with: the words that name it, and a description for people."""

    adapter: str
    model: Path | None
    description: str


def recorded_baseline(
    adapter: str | None, model: Path | None, *, is_remote: bool = False
) -> str | None:
    """Return the shipped adapter that answers sequentially in place of the named one.

    It was trained on the same base without tags. Own adapters, whole models and servers have none.
    """
    name = adapter_name(adapter, model)
    if is_remote or whole_model(adapter, model) is not None or name not in shipped_adapters():
        return None
    return BASES[known_base_of(name)].baseline


def baseline_of(
    adapter: str | None, model: Path | None, named: str | None, *, is_remote: bool = False
) -> Baseline:
    """Return the baseline of the checkpoint that the words name.

    named: an adapter or a whole model. None, or `sequential`: for adapters that ship, the one that
           was trained on the same base without tags. None: for others, the base model.

    Raises PastaError for whole models and servers without `named`: their baseline is unknown.
    """
    whole_path = whole_model(adapter, model)
    name = adapter_name(adapter, model)
    has_adapter_here = whole_path is None and not is_remote
    recorded = recorded_baseline(adapter, model, is_remote=is_remote)
    if named is not None and not (recorded and named == SEQUENTIAL):
        same_weights = named in (name, str(whole_path))
        weights = "the same weights with" if same_weights else f"{named},"
        base = model if whole_path is None else None
        return Baseline(named, model_beside(named, base), f"{weights} promises banned")
    if not has_adapter_here:
        raise PastaError(
            f"no baseline is known for {whole_path or 'a model on servers'}: name an adapter or "
            "a whole model with --baseline"
        )
    if recorded is not None:
        description = "trained on many of the same responses with the tags taken out"
        return Baseline(recorded, model, description)
    description = "the base model as it is, which was not trained on these responses"
    return Baseline(NO_ADAPTER, model, description)
