"""The base of every config class: frozen, typed, and refusing what it does not know.

Each config class lives beside what it configures. A field that changes what a stage WRITES (sampling, limits,
seeds, encodings, hyper-parameters) is marked `CONTENT` and enters the stage's key; one that only changes how the
work is done (time limits, concurrency, paths, number of GPUs) is not.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _ContentMarker:
    """Marks a field as part of the stage's key: `temperature: Annotated[float, CONTENT] = 0.7`."""


CONTENT = _ContentMarker()


class Config(BaseModel):
    """Base of every config class. The docstring under a field is its description in the Prefect UI."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

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


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.content()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
