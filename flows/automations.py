"""Install the automations in deployments/automations/: who puts back a run whose node has died, and who is told.

Each file is one automation of Prefect's. They are known by their names: one that is there is changed only where it
differs, so that what it is counting goes on, and one that a person has switched off stays off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from infra.errors import InfrastructureError, InputError
from infra.locations import project_home

Installed = dict[str, str]


def install(folder: Path | None = None, notify: str | None = None) -> list[Installed]:
    """Make the server's automations those of the folder; others there are left alone.

    Args:
        folder: of YAML files; by default the project's own.
        notify: notification block that is told of failures and promotions, as type/name (`slack-webhook/team`);
            without one, the automations in `notify/` are left as the server has them.

    Returns:
        For each: its `name` and what was `done` (created, updated, unchanged).

    Raises:
        InputError: PREFECT_API_URL is not set, the folder holds no automation, or there is no such block.
        InfrastructureError: the server does not answer.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        raise InputError(
            "PREFECT_API_URL",
            "is not set; automations belong to a Prefect server that stays, so name one, such as "
            "http://prefect.example:4200/api",
        )
    import httpx
    from prefect.client.orchestration import SyncPrefectClient

    folder = folder or project_home() / "deployments" / "automations"
    wanted = _read(folder)
    try:
        key, password = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING")
        with SyncPrefectClient(url, api_key=key, auth_string=password) as client:
            if notify is not None:
                wanted += _read(folder / "notify", block_id=_block_id(client, notify))
            return [{"name": automation.name, "done": _install(client, automation)} for automation in wanted]
    except httpx.HTTPError as error:
        raise InfrastructureError(f"the Prefect server at {url} does not take automations: {error!r}") from error


def _block_id(client: Any, notify: str) -> str:
    from prefect.exceptions import ObjectNotFound

    type_slug, separator, name = notify.partition("/")
    if not separator or not name:
        raise InputError("--notify", f"{notify!r} is not of the form type/name, such as slack-webhook/team")
    try:
        block = client.read_block_document_by_name(name, type_slug, include_secrets=False)
    except ObjectNotFound:
        raise InputError("--notify", f"the Prefect server has no block {notify}; create it there") from None
    return str(block.id)


def _read(folder: Path, block_id: str | None = None) -> list[Any]:
    """The automations of a folder's files.

    Args:
        block_id: of the notification block that their actions use.
    """
    from prefect.events.schemas.automations import AutomationCore

    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise InputError(str(folder), "holds no automation; set DRAFTSMITH_HOME to the checkout")
    trees = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    for action in (action for tree in trees for action in tree["actions"] if block_id is not None):
        action["block_document_id"] = block_id
    return [AutomationCore.model_validate(tree) for tree in trees]


def _install(client: Any, wanted: Any) -> str:
    standing = client.read_automations_by_name(wanted.name)
    if not standing:
        client.create_automation(wanted)
        return "created"
    kept, *doubles = standing
    for double in doubles:
        client.delete_automation(double.id)
    if _content(kept) == _content(wanted):
        return "unchanged"
    client.update_automation(kept.id, wanted.model_copy(update={"enabled": kept.enabled}))
    return "updated"


def _content(automation: Any) -> Any:
    """What an automation does, without the ids that the server gives and whether it is switched on."""
    return _without(automation.model_dump(mode="json"), ("id", "enabled", "created", "updated"))


def _without(value: Any, names: Iterable[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(item, names) for name, item in value.items() if name not in names}
    if isinstance(value, list):
        items = [_without(item, names) for item in value]
        return sorted(items) if all(isinstance(item, str) for item in items) else items
    return value
