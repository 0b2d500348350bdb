"""Which files two words open, an adapter's and a model's: every kind of word, every refusal.

All paths are relative to one folder, which the tests run in; `SHIPPED` holds Pasta's own adapters.
"""

import shutil
from pathlib import Path

import pytest

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import open_decoder
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.catalog import (
    BaseAlone,
    Baseline,
    BaseWithAdapter,
    WholeModel,
    baseline_of,
    find_adapter,
    recorded_baseline,
    resolve,
    short_name,
)
from pasta_decoding.models.checkpoint import GGUF_KEY, read_checkpoint
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.gguf_writer import write_gguf
from pasta_decoding.models.load import load_model
from tests.checkpoint import TinyCheckpoint
from tests.remote.fake import Fake, serving
from tests.scripted import shuffled

CACHE = Path("cache")
SMALL = "smollm2-135m"
LARGE = "qwen2.5-coder-1.5b"
LARGE_PLAIN = f"{LARGE}-sequential"
PULLED = f"cache/{SMALL}/{SMALL}.gguf"


@pytest.fixture(scope="module")
def world(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, or an adapter, in every form that Pasta reads.

    base, base.gguf:      a base model without an adapter.
    adapter, run/adapter: one for it, alone and as a training run leaves it.
    merged, merged.gguf:  both in one, as `pasta export` writes them.
    hub/OWNER/NAME:       what the hub has.
    cache:                has the small known model, and not the large one.
    """
    world = tmp_path_factory.mktemp("world")
    shutil.copytree(tiny_checkpoint.base, world / "base")
    shutil.copytree(tiny_checkpoint.adapter, world / "adapter")
    write_gguf(load_model(BaseAlone(world / "base")), world / "base.gguf", float_type="F32")
    hide_checkpoint(world / "base.gguf")
    merged = load_model(BaseWithAdapter(world / "base", world / "adapter"))
    export_hf(merged, world / "merged")
    write_gguf(merged, world / "merged.gguf", float_type="F32")

    (world / "empty").mkdir()
    (world / "unfinished").mkdir()
    (world / "unfinished" / "metrics.jsonl").touch()
    shutil.copytree(world / "adapter", world / "run" / "adapter")
    (world / "run" / "metrics.jsonl").touch()
    for name in ("base", "adapter", "merged"):
        shutil.copytree(world / name, world / "hub" / "org" / name)
    (world / PULLED).parent.mkdir(parents=True)
    shutil.copyfile(world / "base.gguf", world / PULLED)
    return world


def hide_checkpoint(gguf: Path) -> None:
    """Make a file of another program's: without the key that holds `pasta.json`."""
    key = GGUF_KEY.encode()
    gguf.write_bytes(gguf.read_bytes().replace(key, b"x" * len(key)))


@pytest.fixture(autouse=True)
def within(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the folder, with a hub that is a folder."""

    def snapshot(name: str, **_: object) -> str:
        if not Path("hub", name).exists():
            raise OSError("cannot reach it")
        return f"hub/{name}"

    monkeypatch.chdir(world)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)


def config_of(adapter: str | None, model: str | None) -> EngineConfig:
    path = None if model is None else Path(model)
    return EngineConfig(adapter, path, "torch", dtype="float32", device="cpu")


def opened_files(adapter: str | None, model: str | None) -> str:
    """Return what is opened: a whole model's path, or a base model's `with` an adapter's."""
    match resolve(adapter, None if model is None else Path(model), CACHE):
        case BaseAlone(weights):
            return f"{weights} alone"
        case WholeModel(weights):
            return f"{weights} whole"
        case BaseWithAdapter(weights, folder):
            shipped = str(find_adapter("balanced").parent)
            return f"{weights} with {folder}".replace(shipped, "SHIPPED")


@pytest.mark.parametrize(
    ("adapter", "model", "files", "label"),
    [
        # nothing, or the name of a known model or of a shipped adapter
        (None, None, f"{PULLED} with SHIPPED/balanced", "balanced"),
        (None, SMALL, f"{PULLED} with SHIPPED/balanced", "balanced"),
        ("balanced", None, f"{PULLED} with SHIPPED/balanced", "balanced"),
        ("sequential", None, f"{PULLED} with SHIPPED/sequential", "sequential"),
        ("balanced", "base", "base with SHIPPED/balanced", "balanced"),
        ("balanced", "org/base", "hub/org/base with SHIPPED/balanced", "balanced"),
        (LARGE, "base", f"base with SHIPPED/{LARGE}", LARGE),
    ],
)
def test_a_known_name_is_a_shipped_adapter_or_a_pulled_model(
    adapter: str | None, model: str | None, files: str, label: str
) -> None:
    assert opened_files(adapter, model) == files
    assert short_name(adapter, None if model is None else Path(model)) == label


@pytest.mark.parametrize(
    ("adapter", "model", "files", "label", "parallel"),
    [
        # a base model: folder, GGUF, name on the hub
        (None, "base", "base alone", "base", False),
        ("none", "base", "base alone", "base", False),
        (None, "base.gguf", "base.gguf whole", "base.gguf", False),
        ("base.gguf", None, "base.gguf whole", "base.gguf", False),
        ("none", "base.gguf", "base.gguf alone", "base.gguf", False),
        (None, "org/base", "hub/org/base alone", "base", False),
        ("none", "org/base", "hub/org/base alone", "base", False),
        ("none", None, f"{PULLED} alone", SMALL, False),
        ("none", SMALL, f"{PULLED} alone", SMALL, False),
        # an adapter: folder, folder of a run, name on the hub
        ("adapter", None, f"{PULLED} with adapter", "adapter", True),
        ("adapter", SMALL, f"{PULLED} with adapter", "adapter", True),
        ("adapter", "base", "base with adapter", "adapter", True),
        ("adapter", "base.gguf", "base.gguf with adapter", "adapter", True),
        ("adapter", "org/base", "hub/org/base with adapter", "adapter", True),
        ("run", None, f"{PULLED} with run/adapter", "run", True),
        ("run", "base", "base with run/adapter", "run", True),
        ("run/adapter", "base", "base with run/adapter", "adapter", True),
        ("org/adapter", None, f"{PULLED} with hub/org/adapter", "adapter", True),
        ("org/adapter", "base", "base with hub/org/adapter", "adapter", True),
        # a whole model, named as either
        (None, "merged", "merged whole", "merged", True),
        ("merged", None, "merged whole", "merged", True),
        (None, "merged.gguf", "merged.gguf whole", "merged.gguf", True),
        ("merged.gguf", None, "merged.gguf whole", "merged.gguf", True),
        (None, "org/merged", "hub/org/merged whole", "merged", True),
        ("org/merged", None, "hub/org/merged whole", "merged", True),
    ],
)
def test_a_path_or_a_name_on_the_hub_is_opened_as_what_it_holds(
    adapter: str | None, model: str | None, files: str, label: str, parallel: bool
) -> None:
    assert opened_files(adapter, model) == files
    assert short_name(adapter, None if model is None else Path(model)) == label
    assert open_decoder(config_of(adapter, model), CACHE).parallel is parallel


ONCE = (
    "is a whole model, adapter included: name it as --model or as --adapter, and leave the other "
    "out"
)
ADAPTERS = f"balanced, {LARGE}, {LARGE_PLAIN}, sequential"
NOT_CACHED = f"the model {LARGE} is not in cache"
NO_RECORD = "holds no pasta.json: not a Pasta adapter"
NO_NAME = "is neither a folder nor a name on the hub, OWNER/NAME"
OFFLINE = "is no folder, and could not be fetched from the hub: cannot reach it"
HAS_ADAPTER = "holds an adapter already: name no other one beside it"


@pytest.mark.parametrize(
    ("adapter", "model", "message"),
    [
        (None, LARGE, NOT_CACHED),
        (LARGE, None, NOT_CACHED),
        ("none", LARGE, NOT_CACHED),
        ("adapter", LARGE, NOT_CACHED),
        # words that name nothing
        ("unknown", None, f"no adapter 'unknown'; {ADAPTERS} ship, or give a folder"),
        ("unknown", "base", f"no adapter 'unknown'; {ADAPTERS} ship, or give a folder"),
        ("a/b/c", None, f"no adapter 'a/b/c'; {ADAPTERS} ship, or give a folder"),
        (None, "unknown", f"unknown {NO_NAME}"),
        ("adapter", "unknown", f"unknown {NO_NAME}"),
        (None, "a/b/c", f"a/b/c {NO_NAME}"),
        (None, "org/gone", f"org/gone {OFFLINE}"),
        ("org/gone", None, f"org/gone {OFFLINE}"),
        (None, "gone.gguf", "gone.gguf cannot be read: No such file or directory"),
        ("gone.gguf", None, "gone.gguf cannot be read: No such file or directory"),
        # folders that hold something else
        ("empty", None, f"empty {NO_RECORD}"),
        ("empty", "base", f"empty {NO_RECORD}"),
        ("base", None, f"base {NO_RECORD}"),
        ("base", "base.gguf", f"base {NO_RECORD}"),
        ("org/base", None, f"hub/org/base {NO_RECORD}"),
        (
            "unfinished",
            None,
            "the training run in unfinished is not finished: it holds no adapter yet",
        ),
        (None, "adapter", "adapter holds an adapter, not a model: name it with --adapter"),
        ("adapter", "adapter", "adapter holds an adapter, not a model: name it with --adapter"),
        (None, "run", "run holds no model"),
        (None, "empty", "empty holds no model"),
        # a whole model and something else
        ("none", "merged", f"merged {ONCE}"),
        ("adapter", "merged", f"merged {ONCE}"),
        ("unknown", "merged", f"merged {ONCE}"),
        ("merged", "base", f"merged {ONCE}"),
        ("merged", SMALL, f"merged {ONCE}"),
        ("merged", "unknown", f"merged {ONCE}"),
        ("merged", "merged.gguf", f"merged.gguf {ONCE}"),
        ("merged.gguf", "base", f"merged.gguf {ONCE}"),
        ("merged.gguf", "base.gguf", f"base.gguf {ONCE}"),
        ("base.gguf", "base", f"base.gguf {ONCE}"),
        ("none", "org/merged", f"org/merged {ONCE}"),
        ("adapter", "org/merged", f"org/merged {ONCE}"),
        ("org/merged", "base", f"hub/org/merged {ONCE}"),
        ("none", "merged.gguf", f"merged.gguf {HAS_ADAPTER}"),
        ("adapter", "merged.gguf", f"merged.gguf {HAS_ADAPTER}"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_a_line(
    adapter: str | None, model: str | None, message: str
) -> None:
    with pytest.raises(PastaError) as refusal:
        open_decoder(config_of(adapter, model), CACHE)
    assert str(refusal.value) == message
    if message == NOT_CACHED:
        assert refusal.value.hint == f"run `pasta pull {LARGE}`"


def test_a_folder_or_a_file_comes_before_a_known_name_and_before_the_hub(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SMALL, "org/merged"):
        shutil.copytree(world / "base", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert opened_files(None, SMALL) == f"{SMALL} alone"
    assert opened_files(None, "org/merged") == "org/merged alone"


@pytest.mark.parametrize(
    ("adapter", "model", "names"),
    [
        ("adapter", "base", ["adapter", "base", "adapter", "base"]),
        ("run", None, ["run", "run"]),
        (None, "merged", ["none", "merged", "none", "merged"]),
        ("merged", None, ["merged", "merged"]),
        ("none", "org/base", ["none", "org/base", "none", "base"]),
    ],
)
def test_servers_are_searched_for_the_words_and_for_their_last_parts(
    adapter: str | None, model: str | None, names: list[str]
) -> None:
    script = shuffled(8)
    with serving(Fake(script, 8, 0, model="x", adapters={"y": script})) as server:
        path = None if model is None else Path(model)
        config = EngineConfig(adapter, path, base_url=(server.url,), join=Joining.text)
        with pytest.raises(PastaError, match=r"serves 'x', 'y', none of them called ") as refusal:
            open_decoder(config, CACHE)
    message = str(refusal.value).partition("called ")[2].partition(" (vLLM")[0]
    assert message == " or ".join(map(repr, names))


# The baseline

TRAINED = "trained on many of the same responses with the tags taken out"
UNTRAINED = "the base model as it is, which was not trained on these responses"
BANNED = "the same weights with promises banned"


@pytest.mark.parametrize(
    ("adapter", "model", "named", "baseline", "label"),
    [
        (None, None, None, Baseline("sequential", None, TRAINED), "sequential"),
        (None, LARGE, "sequential", Baseline(LARGE_PLAIN, Path(LARGE), TRAINED), LARGE_PLAIN),
        ("runs/mine", None, None, Baseline("none", None, UNTRAINED), SMALL),
        (
            "runs/mine",
            "org/model",
            "runs/plain",
            Baseline("runs/plain", Path("org/model"), "runs/plain, promises banned"),
            "plain",
        ),
        (
            "runs/mine",
            "org/model",
            "runs/mine",
            Baseline("runs/mine", Path("org/model"), BANNED),
            "mine",
        ),
        (
            "runs/mine",
            "org/model",
            "plain.gguf",
            Baseline("plain.gguf", None, "plain.gguf, promises banned"),
            "plain.gguf",
        ),
        (None, "mine.gguf", "mine.gguf", Baseline("mine.gguf", None, BANNED), "mine.gguf"),
    ],
)
def test_a_checkpoint_is_compared_with_what_is_named_or_ships_else_with_its_base_model(
    adapter: str | None, model: str | None, named: str | None, baseline: Baseline, label: str
) -> None:
    assert baseline_of(adapter, None if model is None else Path(model), named) == baseline
    assert short_name(baseline.adapter, baseline.model) == label


def test_only_shipped_adapters_have_a_recorded_baseline() -> None:
    assert recorded_baseline("balanced", None) == recorded_baseline("sequential", None)
    assert recorded_baseline(None, Path(LARGE)) == LARGE_PLAIN
    assert recorded_baseline("runs/mine", None) is None
    assert recorded_baseline(None, Path("mine.gguf")) is None
    assert recorded_baseline("balanced", None, is_remote=True) is None


@pytest.mark.parametrize(("model", "is_remote"), [(Path("mine.gguf"), False), (None, True)])
def test_the_baseline_of_a_whole_model_or_of_a_server_must_be_named(
    model: Path | None, is_remote: bool
) -> None:
    with pytest.raises(PastaError, match=r"no baseline is known for .* --baseline"):
        baseline_of(None, model, None, is_remote=is_remote)


@pytest.mark.parametrize(
    ("adapter", "join"), [("balanced", "kv"), ("balanced", "text"), ("sequential", "kv")]
)
def test_a_shipped_adapter_knows_the_joins_of_the_engines_that_take_it(
    adapter: str, join: str
) -> None:
    assert join in read_checkpoint(find_adapter(adapter)).joins
