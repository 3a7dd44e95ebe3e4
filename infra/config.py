"""The base of every config class: frozen, typed, and refusing what it does not know.

Each config class lives beside what it configures. A field that changes what a stage WRITES (sampling, limits,
seeds, encodings, hyper-parameters) is marked `CONTENT` and enters the stage's key; one that only changes how the
work is done (time limits, concurrency, paths, number of GPUs) is not.
"""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema

from infra.locations import project_home

_UNITS = {"seconds": "seconds", "gib": "GiB", "nats": "nats"}
_SPELLED = {
    "Vllm": "vLLM",
    "Gpu": "GPU",
    "gpu": "GPU",
    "Ttt": "TTT",
    "lm": "LM",
    "len": "length",
    "Num": "Number of",
}


class _ContentMarker:
    """Marks a field as part of the stage's key: `temperature: Annotated[float, CONTENT] = 0.7`."""


CONTENT = _ContentMarker()


def _found(name: str, info: ValidationInfo) -> str:
    """The name, made absolute where it is relative and something lies there in one of the context's folders."""
    path, home = Path(name).expanduser(), project_home()
    for folder in (info.context or {}).get(FOLDERS, ()):
        place = str(folder / path)
        if Path(place).exists() or (("*" in name or "?" in name) and glob.glob(place)):
            # What every node has in its own checkout keeps its name: a node's helpers are given this config.
            return name if place == str(home / path) else place
    return name


FOLDERS = "folders"
"""In the context of a validation: where relative paths are looked for, in this order, before the project's home."""

InputPath = Annotated[str, AfterValidator(_found)]
"""A path of what is read, or another name of it (a URL, a hub id), which stays as it is."""


class Config(BaseModel):
    """Base of every config class. The docstring under a field is its description in the Prefect UI."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        field_title_generator=lambda name, _: field_title(name),
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of a form in which every field may be left empty: it is then as the profile says.

        A default would be filled into the form, sent with it, and so overrule the profile; it is told in words.
        """
        outer = handler(core)
        schema = handler.resolve_ref_schema(outer)
        schema.pop("required", None)
        for position, (name, field) in enumerate(schema.get("properties", {}).items()):
            field["position"] = position  # PostgreSQL's jsonb forgets the order
            default = field.pop("default", None)
            field["title"] = field_title(name)
            if field.get("type") == "boolean":
                field.pop("type")
                field["enum"] = [True, False]  # of this type, the older pages send an untouched field as false
            if default is not None and not isinstance(default, dict):
                told = f"Default: {json.dumps(default, ensure_ascii=False)}."
                field["description"] = f"{field.get('description', '')} {told}".strip()
        return outer

    def content(self) -> dict[str, Any]:
        """What of this config enters the stage's key: the CONTENT fields that differ from their defaults.

        Defaults are left out so that a new field with a default changes no key. A nested config, or a list of
        them, contributes its own content. Returns plain JSON types.
        """
        found: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            if not any(isinstance(mark, _ContentMarker) for mark in info.metadata):
                continue
            value = getattr(self, name)
            if not info.is_required() and value == info.get_default(call_default_factory=True):
                continue
            plain = _plain(value)
            if isinstance(value, Config) and not plain:
                continue  # it differs in what changes nothing that is written
            found[name] = plain
        return found


def field_title(name: str) -> str:
    """A field's name as a title with its unit: `hang_timeout_seconds` is `Hang timeout (seconds)`."""
    words = name.split("_")
    unit = f" ({_UNITS[words.pop()]})" if len(words) > 1 and words[-1] in _UNITS else ""
    return " ".join(_SPELLED.get(word, word) for word in [words[0].capitalize(), *words[1:]]) + unit


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.content()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
