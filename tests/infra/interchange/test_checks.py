"""Data folders that do not fit, or cannot be: refused before anything is written, in a line that says what is right."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, load_from_disk

from flows.cli import EXIT_WRONG_INPUT, main
from flows.config import load_config
from flows.import_checks import refuse_unfit_import
from flows.resolve import resolve
from infra.errors import InputError
from tests.fakes.data_folder import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    ids_of,
    import_tree,
    pipeline,
    states_of,
    write_folder,
    write_states,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data")


@pytest.fixture
def tree(tmp_path: Path, folder: Path) -> dict[str, Any]:
    return import_tree(tmp_path, folder)


@pytest.fixture
def _process_state() -> Iterator[None]:
    """`main` sets up logging and signal handlers for its process; this process goes on."""
    handlers = list(logging.getLogger("draftsmith").handlers)
    on_signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    logging.getLogger("draftsmith").handlers[:] = handlers
    for number, handler in on_signals.items():
        signal.signal(number, handler)


def refuse(tree: dict[str, Any], *words: str, **source: Any) -> None:
    config = pipeline(tree, **source)
    with pytest.raises(InputError) as caught:
        refuse_unfit_import(config, resolve(config))
    text = str(caught.value)
    assert text.startswith("import_states.")
    assert "\n" not in text
    for word in words:
        assert word in text
    assert not Path(tree["root"]).exists()


def without(folder: Path, column: str) -> None:
    rest = folder.with_name("rest")
    load_from_disk(folder).remove_columns(column).save_to_disk(rest)
    shutil.move(folder / "hidden_states", rest)
    shutil.rmtree(folder)
    rest.rename(folder)


Spoil = Callable[[Path], Any]
SPOILED: list[Any] = [
    pytest.param(lambda folder: shutil.rmtree(folder), ["is no data set", "prepare-data"], id="no data set"),
    pytest.param(lambda folder: (folder / "state.json").write_text("{"), ["cannot be read"], id="torn data set"),
    pytest.param(lambda folder: without(folder, "loss_mask"), ["lacks the column loss_mask"], id="no mask"),
    pytest.param(
        lambda folder: shutil.rmtree(folder / "hidden_states"),
        ["holds no hs_*.safetensors", "generate-offline-data", "hidden_states_folder"],
        id="no states",
    ),
    pytest.param(
        lambda folder: [(folder / f"hidden_states/hs_{row}.safetensors").unlink() for row in (1, 3)],
        ["hs_1.safetensors (and 1 more) is not in", "import_states.missing=leave_out"],
        id="missing files",
    ),
    pytest.param(
        lambda folder: (folder / "hidden_states/hs_2.safetensors").write_bytes(b""),
        ["hs_2.safetensors in", "is empty"],
        id="an empty file",
    ),
    pytest.param(
        lambda folder: (folder / "hidden_states/hs_2.safetensors").write_bytes(b"torn"),
        ["1 of 5 rows", "1 are torn, hs_2.safetensors for one", "extract.max_failed_share 0.02"],
        id="too many torn files",
    ),
    pytest.param(
        lambda folder: write_states(folder, 0, ids_of(0, 7), torch.ones(7, NUM_LAYERS, 16).bfloat16()),
        ["hs_0.safetensors holds states of shape [7, 4, 16]", "has hidden_size 8"],
        id="another width",
    ),
    pytest.param(
        lambda folder: write_states(folder, 0, ids_of(0, 7), torch.ones(7, 3, HIDDEN_SIZE).bfloat16()),
        ["so 3 layers, but extract.layer_ids are [1, 2, 4, 6]"],
        id="fewer layers",
    ),
    pytest.param(
        lambda folder: write_states(folder, 1, ids_of(1, 5)[:4], states_of(1, 4)),
        ["hs_1.safetensors holds states of shape [4, 4, 8] and 4 token_ids, but row 1 has 5 input_ids"],
        id="a prefix-cache-shortened sample",
    ),
    pytest.param(
        lambda folder: (folder / "draftsmith.json").write_text('{"layer_ids": [1, 3, 4, 6]}'),
        ["holds layers [1, 3, 4, 6]", "set extract.layer_ids to [1, 3, 4, 6]"],
        id="other layers",
    ),
    pytest.param(
        lambda folder: (folder / "draftsmith.json").write_text('{"verifier_revision": "abc"}'),
        ["is of the verifier with revision abc, but model has"],
        id="another verifier",
    ),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_a_folder_that_does_not_fit_is_refused(
    tree: dict[str, Any], folder: Path, spoil: Spoil, words: list[str]
) -> None:
    spoil(folder)
    refuse(tree, *words)


ROWS = {"input_ids": [[1, 2, 3], [4, 5, 6]], "loss_mask": [[0, 1, 1], [0, 1, 1]]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"input_ids": [[1, 2, 3], [4, 50, 6]]}, ["row 1", "token id 50, outside the 50 of model"]),
        ({"input_ids": [[1, -2, 3], [4, 5, 6]]}, ["row 0", "token id -2"]),
        ({"loss_mask": [[0, 1, 1], [0, 1]]}, ["row 1", "loss_mask of another length"]),
        ({"input_ids": [[1, 2, 3], []], "loss_mask": [[0, 1, 1], []]}, ["row 1", "has no input_ids"]),
        ({"input_ids": [["a"], ["b"]]}, ["column input_ids", "lists of integers"]),
        ({"input_ids": [[1, None, 3], [4, 5, 6]]}, ["column input_ids", "nulls"]),
        ({"loss_mask": [[0, 1, 1], None]}, ["column loss_mask", "nulls"]),
        ({"sample_id": ["one", "one"]}, ["two rows", "sample_id 'one'"]),
    ],
)
def test_rows_that_cannot_be_are_refused(
    tree: dict[str, Any], tmp_path: Path, rows: dict[str, Any], words: list[str]
) -> None:
    Dataset.from_dict(ROWS | rows).save_to_disk(tmp_path / "rows")
    for row in range(2):
        write_states(tmp_path / "rows", row, ROWS["input_ids"][row], states_of(row, 3))
    refuse(tree, *words, folder=str(tmp_path / "rows"))


def test_several_splits_are_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_dict(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    refuse(tree, "several splits (train)", folder=str(tmp_path / "splits"))


def test_a_folder_of_another_revision_is_refused(tree: dict[str, Any]) -> None:
    refuse(tree, "import_states.revision", "has revision", revision="0" * 32)


@pytest.mark.usefixtures("_process_state")
def test_the_command_line_says_it_in_one_line_and_writes_nothing(
    tree: dict[str, Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "hidden_states/hs_0.safetensors").write_bytes(b"")
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    for command in (["run"], ["plan", "--json"]):
        assert main([*command, str(tmp_path / "config.yaml")]) == EXIT_WRONG_INPUT
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("draftsmith: import_states.folder: hs_0.safetensors")
    assert not Path(tree["root"]).exists()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["generate.redo_from=0123456789abcdef", "generate.redo=[failed]"],
            r"generate\.redo_from: cannot be given together with import_states",
        ),
        (["extract.checks.on_policy=required"], r"import_states\.temperature: must be given where .* `required`"),
    ],
)
def test_what_an_import_excludes(tree: dict[str, Any], tmp_path: Path, overrides: list[str], line: str) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    with pytest.raises(InputError, match=line):
        load_config(str(tmp_path / "config.yaml"), overrides)
