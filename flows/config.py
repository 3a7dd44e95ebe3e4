"""The whole pipeline's configuration: one YAML file, the configs of the rooms composed.

Unknown keys are refused; every error names the field as the user wrote it and says what would be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from infra.config import FOLDERS, Config
from infra.drafts.vocab import VocabConfig
from infra.errors import InputError
from infra.evaluation.config import PROMOTED, EvaluateConfig
from infra.extraction.engine import ExtractConfig
from infra.gpu_sets import check_set_sizes
from infra.inference import GenerateConfig
from infra.interchange.importing import ImportConfig
from infra.locations import project_home
from infra.nodes_config import NodesConfig
from infra.promotion.gate import PromoteConfig
from infra.prompts.samples import PromptsConfig
from infra.training.config import TrainConfig
from infra.verifiers.verifier import VerifierConfig
from infra.vllm_server import VllmConfig


def profile_names() -> list[str]:
    """Names of the configs in deployments/ that are there to be chosen."""
    return sorted(path.stem for path in profile_folder().glob("*.yaml"))


def profile_folder() -> Path:
    return project_home() / "deployments"


def profile_tree(name: str) -> dict[str, Any]:
    """The fields of a profile, as its file gives them.

    Raises:
        InputError: there is no such profile, or its file is not a config.
    """
    if name not in (known := profile_names()):
        raise InputError("profile", f"there is no profile {name!r}; known are {', '.join(known)}")
    tree = _read_yaml(str(profile_folder() / f"{name}.yaml"))
    if "profile" in tree:
        raise InputError("profile", f"{name}.yaml names a profile itself; a profile must stand alone")
    return tree


def _is_none(value: object) -> bool:
    return value is None


def _as_drop_down(schema: dict[str, Any]) -> None:
    schema.pop("anyOf", None)
    schema.update(type="string", enum=profile_names())


class PipelineConfig(Config):
    """Everything one pipeline run needs: a profile, and what differs from it. What is left empty is as it says."""

    # Stages' keys are made of the content fields of these sections.

    profile: str | None = Field(default=None, exclude_if=_is_none, json_schema_extra=_as_drop_down)
    """A config in deployments/, by its name without `.yaml`: every field that is not given here is as it says."""
    root: str = Field(min_length=1)
    """Where the artifacts live: a folder, or s3://bucket/prefix."""
    credentials_block: str | None = Field(default=None, min_length=1)
    """Name of a Prefect block of type AWS Credentials; by default the environment's AWS_* variables are used."""
    verifier: VerifierConfig
    """The model that the draft will speak for."""
    vllm: VllmConfig = VllmConfig()
    """How vLLM is started, for generation, extraction and evaluation alike."""
    prompts: PromptsConfig
    """Where prompts come from and how they are split."""
    generate: GenerateConfig = GenerateConfig()
    """How the verifier answers the prompts."""
    extract: ExtractConfig = ExtractConfig()
    """Which hidden states are taken, and how they are stored."""
    import_states: ImportConfig | None = None
    """Responses and their hidden states out of a speculators data folder, in place of generation and extraction."""
    vocab: VocabConfig = VocabConfig()
    """The draft's vocabulary."""
    train: TrainConfig = TrainConfig()
    """How the draft is trained."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """How the speculator is measured against no speculation and n-gram."""
    promote: PromoteConfig | None = None
    """What a draft must show to be promoted; without this section none is. In no stage's key."""
    nodes: NodesConfig = NodesConfig()
    """How many nodes share the work, and what they cost."""
    max_idle_attempts: int = Field(default=5, ge=1)
    """A deployment's run that dies is started again by itself; after this many attempts in a row that committed
    nothing new it fails instead."""

    @model_validator(mode="before")
    @classmethod
    def _on_top_of_profile(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("profile") is None:
            return given
        return _laid_over(cls, profile_tree(str(given["profile"])), given)

    @field_validator("root")
    @classmethod
    def _is_a_root(cls, root: str) -> str:
        scheme, separator, rest = root.partition("://")
        if separator and (scheme not in ("file", "s3") or not rest.strip("/")):
            raise ValueError(f"{root!r} is neither a folder nor of the form s3://bucket/prefix")
        if separator and "@" in rest.partition("/")[0]:
            raise ValueError("must hold no credentials; they come from the environment or from credentials_block")
        return root

    @model_validator(mode="after")
    def _import_is_clear(self) -> Self:
        if self.import_states is None:
            return self
        if self.generate.redo_from is not None:
            raise ValueError("generate.redo_from: cannot be given together with import_states; leave out the one")
        if self.import_states.temperature is None and self.extract.checks.on_policy == "required":
            raise ValueError(
                "import_states.temperature: must be given where extract.checks.on_policy is `required`: text is "
                "judged by how it was sampled"
            )
        return self

    @model_validator(mode="after")
    def _start_is_clear(self) -> Self:
        if self.vocab.from_start and self.train.init_from is None:
            raise ValueError("vocab.from_start: keeps the vocabulary of train.init_from's draft; name one there")
        return self

    @model_validator(mode="after")
    def _answers_fit(self) -> Self:
        longest = self.vllm.max_model_len
        for section, limit in (("generate", self.generate.max_tokens), ("evaluate", self.evaluate.max_tokens)):
            if longest is not None and limit >= longest - 1:  # extraction must be able to add a token
                raise ValueError(
                    f"{section}.max_tokens: {limit} leaves no room for a prompt in vllm.max_model_len "
                    f"{longest}; lower the one or raise the other"
                )
        return self

    @model_validator(mode="after")
    def _gate_is_measured(self) -> Self:
        missing = set(self.promote.min_speedup if self.promote else ()) - set(self.evaluate.concurrency)
        if missing:
            raise ValueError(
                f"promote.min_speedup: {min(missing)} requests in flight are not measured; add them to "
                "evaluate.concurrency, or leave them out"
            )
        if self.promote and self.promote.not_worse_than == PROMOTED and PROMOTED not in self.evaluate.drafts:
            raise ValueError(
                "promote.not_worse_than: `promoted` must be measured to be compared with; add it to "
                "evaluate.drafts, or set not_worse_than to null"
            )
        return self

    @model_validator(mode="after")
    def _gpus_fit(self) -> Self:
        servers, vllm = self.generate.servers, self.vllm
        sizes = "tensor x pipeline"
        check_set_sizes(servers.gpu_sets, vllm.gpus_per_server, "generate.servers.gpu_sets", f"{sizes} x data")
        check_set_sizes(self.extract.gpu_sets, vllm.gpus_per_engine, "extract.gpu_sets", sizes)
        return self


def load_config(path: str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a YAML file, apply `a.b=value` overrides, and check the whole.

    A relative path of what is read is looked for beside the file, then in the current folder, then in the project's
    home: in a config that came from no file only there.

    Raises:
        InputError: the file is absent or not YAML, an override is malformed, or a field is unknown or wrong.
    """
    tree = _read_yaml(path)
    for override in overrides:
        _apply(tree, override)
    folders = (Path(path).absolute().parent, Path.cwd())
    try:
        return PipelineConfig.model_validate(tree, context={FOLDERS: folders})
    except ValidationError as error:
        raise input_error(error) from None


# Where pydantic speaks of Python's types.
_KINDS = {
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of fields",
}


def input_error(error: ValidationError) -> InputError:
    """The first thing pydantic found, as one line that names the field and says what would be right."""
    first = error.errors()[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    match first["type"]:
        case "extra_forbidden":
            known = _siblings(first["loc"])
            meant = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
            told = f"did you mean {meant[0]}?" if meant else f"known are {', '.join(known)}"
            problem = f"is not a known field here; {told}"
        case "missing":
            problem = "is required and is not there"
        case "value_error":  # ours: says all itself; one about several sections begins with the field's name
            problem = first["msg"].removeprefix("Value error, ")
            if not field:
                field, _, problem = problem.partition(": ")
        case kind:
            shown = repr(first["input"])
            problem = _KINDS.get(kind) or f"{first['msg'][0].lower()}{first['msg'][1:]}"
            problem += f", not {shown}" if len(shown) < 60 else ""
    return InputError(field or "config", problem + more)


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields that are known where an unknown one was found."""
    model: Any = PipelineConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        if not (isinstance(model, type) and issubclass(model, Config)) or part not in model.model_fields:
            continue
        model = _config_class(model.model_fields[part].annotation)
    return sorted(model.model_fields) if isinstance(model, type) and issubclass(model, Config) else []


def _config_class(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _config_class(argument)) is not None:
            return found
    return None


def _laid_over(model: Any, below: dict[str, Any], given: Any) -> dict[str, Any]:
    """`given` on top of `below`: sections are merged, any other value (a list, a mapping of names) is replaced."""
    merged = dict(below)
    for name, value in given.items():
        field, under = model.model_fields.get(name), below.get(name)
        section = _config_class(field.annotation) if field else None
        if section is not None and isinstance(value, dict) and isinstance(under, dict):
            value = _laid_over(section, under, value)
        merged[name] = value
    return merged


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(path, "there is no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, f"cannot be read as text: {error}") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise InputError(
            path, f"is not valid YAML: {where}{getattr(error, 'problem', None) or 'unreadable'}"
        ) from None
    if not isinstance(tree, dict):
        raise InputError(path, "must be a YAML mapping with the fields root, verifier, prompts, …")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise InputError("--set", f"{override!r} is not of the form section.field=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError("--set", f"the value of {name} is not valid YAML: {text!r}") from None
    *sections, last = name.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise InputError("--set", f"{name}: {section} is not a section")
    tree[last] = value
