"""Which draft training starts from: known by content, found in a folder, in another root or on the hub."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from infra import manifest
from infra.drafts.start_draft import StartConfig, kept_tokens, start_folder, start_revision, token_ids
from infra.drafts.vocab import FILE_NAME, VocabConfig, VocabMap
from infra.errors import InputError
from infra.fingerprint import sha256_hex, stage_content
from infra.manifest import Shard, StageRef
from tasks.vocab import build_vocabulary
from tests.fakes.hub import COMMIT, UNREACHABLE, run_against, serving
from tests.fakes.start_draft import write_drafts_stage


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write(tmp_path / "draft")


def write(folder: Path, tokens: tuple[int, ...] = (1, 4, 7)) -> Path:
    """As far as anybody looks at it who does not train from it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    ids = torch.tensor(tokens)
    t2d = torch.zeros(9, dtype=torch.bool)
    t2d[ids] = True
    tensors = {"d2t": ids - torch.arange(len(ids)), "t2d": t2d, "lm_head.weight": torch.zeros(len(ids), 2)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_folder_is_known_by_its_content(tmp_path: Path, draft: Path) -> None:
    config = StartConfig(draft=str(draft))
    assert start_folder(config) == draft
    elsewhere = shutil.copytree(draft, tmp_path / "elsewhere")
    assert start_revision(StartConfig(draft=str(elsewhere))) == start_revision(config)
    other = write(tmp_path / "other", (1, 4, 8))
    assert start_revision(StartConfig(draft=str(other))) != start_revision(config)


def test_an_exported_draft_of_any_root_is_fetched_once_and_is_the_same(any_root: str, draft: Path) -> None:
    uri = write_drafts_stage(any_root if "://" in any_root else f"file://{any_root}", draft)
    config = StartConfig(draft=uri)
    assert start_revision(config) == start_revision(StartConfig(draft=str(draft)))
    folder = start_folder(config)
    assert {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")} == {
        name: (draft / name).read_bytes() for name in ("config.json", "model.safetensors")
    }
    before = (folder / "model.safetensors").stat().st_ino
    assert start_folder(config) == folder
    assert (folder / "model.safetensors").stat().st_ino == before
    (folder / "model.safetensors").write_bytes(b"torn")
    assert (start_folder(config) / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()


def test_a_damaged_export_is_not_taken(tmp_path: Path, draft: Path) -> None:
    uri = write_drafts_stage(f"file://{tmp_path}/root", draft)
    file = Path(uri.removeprefix("file://"), "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"is damaged: .*; export it again there"):
        start_folder(StartConfig(draft=uri))
    assert not list((tmp_path / "cache" / "drafts").iterdir())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/draft", "is not there; give a folder, a Hugging Face id or <root>/drafts/<key>/export"),
        ("file:///tmp/root/drafts/0123456789abcdef", "is no exported draft"),
        ("file:///tmp/root/vocab/0123456789abcdef/export", "is no exported draft"),
        ("file:///no/such/root/drafts/0123456789abcdef/export", "no complete drafts stage"),
    ],
)
def test_what_is_not_there_is_refused(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        start_revision(StartConfig(draft=name))
    assert caught.value.field == "train.init_from.draft"


def test_a_folder_without_whole_weights_is_refused(draft: Path) -> None:
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InputError, match="cut short"):
        start_revision(StartConfig(draft=str(draft)))
    weights.rename(draft / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled weights are not loaded"):
        start_revision(StartConfig(draft=str(draft)))


def test_a_pinned_revision_must_match_and_outlives_its_draft(draft: Path) -> None:
    revision = start_revision(StartConfig(draft=str(draft)))
    assert start_revision(StartConfig(draft=str(draft), revision=revision[:9])) == revision
    other = sha256_hex(b"other")
    with pytest.raises(InputError, match=r"^train\.init_from\.revision: is "):
        start_revision(StartConfig(draft=str(draft), revision=other))
    shutil.rmtree(draft)
    assert start_revision(StartConfig(draft=str(draft), revision=revision)) == revision
    with pytest.raises(InputError, match="is not there"):
        start_revision(StartConfig(draft=str(draft), revision=revision[:9]))
    with pytest.raises(InputError, match="is not there"):
        start_folder(StartConfig(draft=str(draft), revision=revision))


def test_its_vocabulary_is_kept_where_asked_for(draft: Path) -> None:
    start = StartConfig(draft=str(draft))
    assert token_ids(draft, 9).tolist() == [1, 4, 7]
    assert kept_tokens(VocabConfig(), start, 9) is None
    kept = kept_tokens(VocabConfig(from_start=True), start, 9)
    assert kept is not None
    assert kept.tolist() == [1, 4, 7]
    with pytest.raises(InputError, match="vocab_size 9, but this verifier's has 10"):
        token_ids(draft, 10)


async def test_the_vocabulary_stage_takes_it(tmp_path: Path, draft: Path) -> None:
    content = stage_content("responses", 1, {}, {}, {})
    responses = StageRef(str(tmp_path), "responses", content)
    (shard,) = manifest.write_plan(responses, [Shard("00000")])
    rows = pa.table({"input_ids": [[1, 3, 3, 7]], "loss_mask": [[False, True, True, True]], "status": ["ok"]})
    sink = io.BytesIO()
    pq.write_table(rows, sink)
    manifest.commit_shard(responses, shard, sink.getvalue(), rows=1, status_counts={"ok": 1}, inputs={})
    manifest.finish(responses, {})
    stage = StageRef(str(tmp_path), "vocab", stage_content("vocab", 1, {}, {}, {"responses": responses.key}))
    (planned,) = manifest.write_plan(stage, [Shard("00000", ("responses/00000",), {"file": FILE_NAME})])
    inputs = manifest.input_records(stage, [planned])
    config = VocabConfig(draft_vocab_size=3, from_start=True)
    record = await build_vocabulary.fn(stage, planned, inputs, config, 9, StartConfig(draft=str(draft)))
    built = VocabMap.from_bytes(manifest.read_shard(stage.uri, record))
    assert built.token_ids.tolist() == [1, 4, 7]
    assert record.extra["coverage"] == pytest.approx(1 / 3)
    with pytest.raises(InputError, match=r"^vocab\.draft_vocab_size: is 4, "):
        await build_vocabulary.fn(
            stage,
            planned,
            inputs,
            VocabConfig(draft_vocab_size=4, from_start=True),
            9,
            StartConfig(draft=str(draft)),
        )


def test_a_head_of_all_tokens_needs_no_map(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    save_file({"lm_head.weight": torch.zeros(9, 2)}, tmp_path / "whole" / "model.safetensors")
    assert token_ids(tmp_path / "whole", 9).tolist() == list(range(9))
    with pytest.raises(InputError, match="no vocabulary map"):
        token_ids(tmp_path / "whole", 10)


# --- the Hugging Face hub ---


@pytest.fixture
def hub(draft: Path) -> Iterator[str]:
    with serving("models", "org/draft", draft) as endpoint:
        yield endpoint


def ask(tmp_path: Path, endpoint: str, call: str, *, offline: bool = False, **fields: Any) -> str:
    code = (
        "import json, sys\n"
        "from infra.drafts.start_draft import *\n"
        "from infra.errors import *\n"
        "try:\n"
        f"    print({call}(StartConfig(**json.loads(sys.argv[1]))))\n"
        "except (InputError, InfrastructureError) as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    argument = {"draft": "org/draft", **fields}
    return run_against(endpoint, code, argument, home=tmp_path / "hf", offline=offline)[-1]


@pytest.mark.seconds
def test_a_hub_draft_is_known_by_its_commit(tmp_path: Path, hub: str, draft: Path) -> None:
    assert ask(tmp_path, hub, "start_revision") == COMMIT
    folder = Path(ask(tmp_path, hub, "start_folder", revision="main"))
    assert (folder / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()
    assert ask(tmp_path, UNREACHABLE, "start_folder", revision=COMMIT) == str(folder)
    assert ask(tmp_path, hub, "start_revision", revision="v9").startswith("InputError train.init_from.revision: ")
    absent = ask(tmp_path, hub, "start_revision", draft="org/none")
    assert absent.startswith("InputError train.init_from.draft: the hub has no model org/none")
