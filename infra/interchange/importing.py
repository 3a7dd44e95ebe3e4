"""Import of a speculators data folder: its rows become responses, its files of states hidden states.

What can be told from the data set and the files' headers is checked as a whole before anything is written. What
only shows in a file's content (it is torn, its ids are others, its states fail a check) makes a failed row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from infra.config import CONTENT, Config, InputPath
from infra.errors import InputError
from infra.extraction.rows import ExtractResult, ExtractSample
from infra.generation.responses import TOKEN_SOURCE_IMPORTED, RowFailure, failed_row
from infra.interchange.folder import (
    REVISION_HEX_DIGITS,
    STATES_FOLDER,
    DataFolder,
    TornFile,
    read_states,
    states_name,
)
from infra.locations import project_home
from infra.schemas import STATUS_OK, STATUS_TRUNCATED
from infra.state_checks.checks import states_problem

SECTION = "import_states"
FIELD = f"{SECTION}.folder"
IMPORTED = "import"
"""Under this name a stage's content has the folder's revision."""


class ImportConfig(Config):
    """A speculators data folder that takes the place of generation and extraction."""

    folder: Annotated[InputPath, Field(min_length=1)]
    """The data set that `speculators prepare-data` wrote, or a folder of `draftsmith export-states`."""
    hidden_states_folder: InputPath | None = Field(default=None, min_length=1)
    """Where the hs_*.safetensors are; by default `hidden_states` in `folder`."""
    revision: str | None = Field(default=None, pattern=f"^[0-9a-f]{{{REVISION_HEX_DIGITS}}}$")
    """The content that the folder must have, or nothing is run; `draftsmith plan` shows it. With it given, the
    folder may be deleted once it is imported."""
    dataset: Annotated[str, CONTENT, Field(min_length=1)] = "imported"
    """Label of the rows in reports."""
    temperature: Annotated[float | None, CONTENT, Field(ge=0, le=2)] = None
    """At which the responses were sampled, where that is known. The folder does not say, and whether text is the
    verifier's own can only be judged with it."""
    shard_size: Annotated[int, CONTENT, Field(ge=1)] = 256
    """Rows per shard: what is redone after a loss."""
    missing: Literal["refuse", "leave_out"] = "refuse"
    """Rows without a file of states: refused as an unfinished folder, or failed rows that count against
    `extract.max_failed_share`."""


def open_folder(config: ImportConfig) -> DataFolder:
    """The folder, opened.

    Raises:
        InputError: it is no data folder, or not of the revision asked for.
    """
    folder = project_home() / Path(config.folder).expanduser()
    states = folder / STATES_FOLDER
    if config.hidden_states_folder is not None:
        states = project_home() / Path(config.hidden_states_folder).expanduser()
    found = DataFolder(folder, states, FIELD)
    if config.revision not in (None, found.revision):
        raise InputError(f"{SECTION}.revision", f"is {config.revision}, but {folder} has revision {found.revision}")
    return found


def import_revision(config: ImportConfig) -> str:
    """Revision of the folder's content, for the keys: as it is, or as the config says where it has been deleted.

    Raises:
        InputError: as `open_folder`.
    """
    gone = not (project_home() / Path(config.folder).expanduser()).exists()
    return config.revision if config.revision is not None and gone else open_folder(config).revision


def response_rows(folder: DataFolder, config: ImportConfig, start: int, stop: int) -> list[dict[str, Any]]:
    """Rows [start, stop) of the folder as rows of `schemas.RESPONSES`.

    What the folder does not say is said to be unknown: no messages, no text, a temperature that is no number. A row
    of which nothing is trained is a failed one, as everywhere.
    """
    return [_response_row(row, config) for row in folder.rows(start, stop)]


def _response_row(row: Mapping[str, Any], config: ImportConfig) -> dict[str, Any]:
    ids, mask = row["input_ids"], row["loss_mask"]
    told = {
        "sample_id": row["sample_id"],
        "dataset": config.dataset,
        "domain": "general",
        "messages": "[]",
    }
    temperature = math.nan if config.temperature is None else config.temperature
    if not any(mask):
        failure = RowFailure("its loss_mask trains no token", temperature=temperature)
        return failed_row(told, failure) | {"token_source": TOKEN_SOURCE_IMPORTED}
    num_prompt_tokens = _start_of_last_run(mask)
    return told | {
        "input_ids": ids,
        "loss_mask": mask,
        "num_prompt_tokens": num_prompt_tokens,
        "num_completion_tokens": len(ids) - num_prompt_tokens,
        "reasoning": None,
        "content": None,
        "tool_calls": None,
        "finish_reason": None,
        "temperature": temperature,
        "status": STATUS_TRUNCATED if row["status"] == STATUS_TRUNCATED else STATUS_OK,
        "error": None,
        "token_source": TOKEN_SOURCE_IMPORTED,
        "latency_seconds": 0.0,
    }


def _start_of_last_run(mask: Sequence[bool]) -> int:
    """Where the last completion begins: the last run of true values."""
    start = len(mask) - 1 - list(reversed(mask)).index(True)
    while start > 0 and mask[start - 1]:
        start -= 1
    return start


def import_results(
    folder: DataFolder, samples: Iterable[tuple[int, ExtractSample]], layer_ids: Sequence[int]
) -> Iterator[ExtractResult]:
    """The states of some rows, one after another and checked: what an extraction engine would have answered.

    Args:
        samples: row of each in the folder, and what is expected there.
    """
    for index, sample in samples:
        states, error = None, None
        try:
            if index not in folder.sizes:
                raise TornFile("it is not there")
            states, ids = read_states(folder.path(index))
            if ids != list(sample.input_ids):
                error = f"ids: {states_name(index)} has {len(ids)} ids that are not those of its row"
            else:
                error = states_problem(states, sample.input_ids, layer_ids)
        except TornFile as problem:
            error = f"import: {states_name(index)} cannot be used: {problem}"
        yield ExtractResult(sample.sample_id, error, None if error else states)
