"""Data sets on the hub: resolved to a commit, fetched once, read without the hub and without running their code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import InfrastructureError, InputError
from infra.prompts import hub as prompt_hub
from infra.prompts.samples import PromptsConfig, dataset_revisions, load_prompts
from tests.fakes.hub import COMMIT, UNREACHABLE, FakeHub, run_against, serving

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files:
  - {split: train, path: other/train-*}
---
# A data set
"""


def config(**source: Any) -> PromptsConfig:
    return PromptsConfig.model_validate({"sources": [{"hub": "org/data", **source}], "heldout_prompts": 0})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A data set's repository with two subsets, two splits, and code that must not run."""
    folder = tmp_path / "repository"
    for subset, split, texts in (
        ("main", "train", ["Why?", "How?", "caf\xe9"]),
        ("main", "test", ["Test?"]),
        ("other", "train", ["Other?"]),
    ):
        (folder / subset).mkdir(parents=True, exist_ok=True)
        name = folder / subset / f"{split}-00000-of-00001.parquet"
        buffers = pa.array([text.encode("latin-1") for text in texts], pa.binary()).buffers()
        pq.write_table(pa.table({"question": pa.StringArray.from_buffers(len(texts), *buffers[1:])}), name)
    (folder / "README.md").write_text(CARD)
    (folder / "lines.json").write_text('{"prompt": "Line?"}\n{"prompt": 3}\n{"prompt": torn\n')
    (folder / "data.py").write_text("raise SystemExit('code of the data set was run')\n")
    return folder


@pytest.fixture
def fetched(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That repository as what the hub's library has downloaded."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(repository))
    monkeypatch.setattr(prompt_hub, "_remember_commit", lambda *args: None)
    return repository


def questions(wanted: PromptsConfig) -> set[str]:
    return {json.loads(row["messages"])[0]["content"] for row in load_prompts(wanted).train}


@pytest.mark.usefixtures("fetched")
def test_a_split_of_a_subset_is_read() -> None:
    columns = {"columns": {"prompt": "question"}, "revision": COMMIT}
    main = config(subset="main", **columns)
    prompts = load_prompts(main)
    assert questions(main) == {"Why?", "How?"}
    assert prompts.dropped == {"data": {"broken_utf8": 1}}
    assert prompts.revisions == dataset_revisions(main) == {"data": f"org/data@{COMMIT}"}
    assert questions(config(subset="main", split="test", **columns)) == {"Test?"}
    assert questions(config(subset="other", **columns)) == {"Other?"}
    contents = [config(subset="main", split=split, **columns).content() for split in (None, "test")]
    assert contents[0] != contents[1]


@pytest.mark.usefixtures("fetched")
def test_files_are_read_row_by_row() -> None:
    wanted = config(files=["lines.*"], revision=COMMIT)
    assert questions(wanted) == {"Line?"}
    assert load_prompts(wanted).dropped == {"data": {"broken_json": 1, "wrong_type": 1}}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"subset": "none"}, "'none' not found. Available: ['main', 'other']"),
        ({"subset": "main", "split": "dev"}, "Bad split: dev. Available splits: ['train', 'test']"),
        ({}, "Config name is missing. Please pick one among the available configs: ['main', 'other']"),
        ({"files": ["none-*.parquet"]}, "org/data has no file none-*.parquet"),
        ({"subset": "main"}, "holds no usable prompt (1 broken_utf8, 2 no_prompt)"),
    ],
)
def test_what_is_not_there_is_named(fetched: Path, source: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        load_prompts(config(revision=COMMIT, **source))
    assert caught.value.field == "prompts.sources[0].hub"
    assert problem in str(caught.value)
    assert str(fetched) not in str(caught.value)


def test_code_beside_the_data_is_refused_not_run(fetched: Path) -> None:
    (fetched / f"{fetched.name}.py").write_text("raise SystemExit('code of the data set was run')\n")
    with pytest.raises(InputError, match="scripts are no longer supported"):
        load_prompts(config(subset="main", revision=COMMIT))


def test_a_download_that_breaks_off_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> str:
        raise ConnectionError("reset by peer\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(InfrastructureError, match=r"org/data.*reset by peer$"):
        load_prompts(config(revision=COMMIT))


# --- against the hub's own client ---


@pytest.fixture
def hub(repository: Path) -> Iterator[str]:
    with serving("datasets", "org/data", repository) as endpoint:
        yield endpoint


def ask(tmp_path: Path, endpoint: str, *sources: dict[str, Any], offline: bool = False) -> list[str]:
    """Revision, prompts or error of each source."""
    code = (
        "import json, sys\n"
        "from infra.prompts.samples import *\n"
        "from infra.errors import *\n"
        "for source in json.loads(sys.argv[1]):\n"
        "    config = PromptsConfig(sources=({'hub': 'org/data', **source},), heldout_prompts=0)\n"
        "    try:\n"
        "        revisions = dataset_revisions(config)\n"
        "        found = load_prompts(config)\n"
        "        assert found.revisions == revisions\n"
        "        print(revisions['data'], sorted(json.loads(r['messages'])[0]['content'] for r in found.train))\n"
        "    except DraftsmithError as error:\n"
        "        print(type(error).__name__, error)\n"
        "assert 'datasets' not in sys.modules\n"
    )
    return run_against(endpoint, code, sources, home=tmp_path / "hf", offline=offline)


@pytest.mark.seconds
def test_a_data_set_is_resolved_fetched_and_found_again_offline(tmp_path: Path, hub: str) -> None:
    lines = {"files": ["lines.json"]}
    unpinned, pinned = ask(tmp_path, hub, lines, {**lines, "revision": COMMIT}, offline=True)
    assert unpinned.startswith("InputError prompts.sources[0].hub: org/data is neither pinned to a commit nor in")
    assert pinned.startswith("InputError prompts.sources[0].hub: org/data at 0123456789ab is not whole in the")
    assert FakeHub.requests == []

    expected = f"org/data@{COMMIT} ['Line?']"
    assert ask(tmp_path, hub, lines, {**lines, "revision": "v9"}, {"hub": "org/none"}) == [
        expected,
        "InputError prompts.sources[0].hub: org/data has no revision v9 on the hub",
        "InputError prompts.sources[0].hub: the hub has no data set org/none, or it is private and HF_TOKEN is not set",
    ]
    assert not any("parquet" in request or ".py" in request for request in FakeHub.requests)

    FakeHub.requests.clear()
    more = {"files": ["main/*.parquet"]}
    again, other = ask(tmp_path, hub, lines, more, offline=True)
    assert again == expected
    assert other.startswith("InputError prompts.sources[0].hub: org/data at 0123456789ab is not whole in the")
    assert FakeHub.requests == []
    # A pinned commit needs no answer from the hub as long as its files are cached; a name does.
    pinned, unpinned = ask(tmp_path, UNREACHABLE, {**lines, "revision": COMMIT}, lines)
    assert pinned == expected
    assert unpinned.startswith(
        "InfrastructureError the Hugging Face hub did not answer about the data set org/data"
    )
