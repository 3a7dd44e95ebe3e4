"""What comes from a store, an event or a model can do no more than it should, and nothing is pickled."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect.utilities.schema_tools.hydration import HydrationContext, hydrate

from flows.config import PipelineConfig
from infra import manifest, storage
from infra.errors import InputError, StageFailed
from infra.evaluation.drafts import fetch_draft, new_draft
from infra.fingerprint import sha256_hex, stage_content
from infra.locations import project_home
from infra.manifest import Shard, StageRef
from infra.promotion import pointer as promotion
from infra.promotion.serve_command import serve_command
from infra.training import checkpoint_files
from infra.training.checkpoint_files import COMMIT_FILE, SHARED_FILES, CheckpointRef

OUTSIDE = (
    "../../../outside",
    "shards/../../../../outside",
    "/etc/outside",
    "a//outside",
    ".hidden",
    "a/.hidden",
    "",
    "a\0b",
)
# Between this project's own processes, over pipes that nobody else holds.
PICKLES = {"infra/extraction/build_pool.py", "infra/extraction/build_worker.py"}
FORBIDDEN = {
    *("eval", "exec", "os.system", "os.popen", "tempfile.mktemp", "yaml.load", "yaml.unsafe_load"),
    *("torch.load", "torch.save", "pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps", "marshal.loads"),
}
FORBIDDEN_ARGUMENTS = (("shell", True), ("verify", False), ("trust_remote_code", True), ("allow_pickle", True))


# --- names ---


def test_names_lead_nowhere_else() -> None:
    for name in ("../x", "a/../../x", "..", "a//b", "./a"):
        with pytest.raises(InputError, match="no name of anything below"):
            storage.join("root", "runs", name)
    assert storage.join("s3://b/p/", "a/b", "", "..c", ".hidden") == "s3://b/p/a/b/..c/.hidden"


@pytest.fixture
def stage(tmp_path: Path) -> StageRef:
    """A drafts stage with a record of one file of its export."""
    found = StageRef(str(tmp_path / "root"), "drafts", stage_content("drafts", 1, {}, {}, {}))
    (shard,) = manifest.write_plan(found, [Shard("00000", extra={"file": "export/config.json"})])
    manifest.commit_shard(found, shard, b"{}", rows=1, status_counts={}, inputs={})
    manifest.finish(found, {})
    return found


def changed(uri: str, **fields: Any) -> None:
    found = json.loads(Path(uri).read_bytes())
    found = {**found, "shards": [{**found["shards"][0], **fields}]} if "shards" in found else {**found, **fields}
    Path(uri).write_text(json.dumps(found))


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_record_of_a_file_outside_of_its_stage_is_none(stage: StageRef, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(b"x")
    planted = {"data": f"export/{name}", "sha256": sha256_hex(b"x"), "size_bytes": 1}
    assert manifest.read_manifest(stage.uri) is not None
    changed(stage.manifest_uri, **planted)
    assert manifest.read_manifest(stage.uri) is None
    changed(manifest.record_uri(stage.uri, "00000"), **planted)
    assert manifest.read_records(stage.uri) == {}
    assert [shard.shard for shard in manifest.inspect(stage).missing] == ["00000"]
    with pytest.raises(InputError, match="holds no speculator"):
        fetch_draft(new_draft(stage.root, stage.key), tmp_path / "fetched")
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("field", ["shard", "file"])
def test_a_plan_with_a_file_outside_of_its_stage_is_none(stage: StageRef, name: str, field: str) -> None:
    assert manifest.read_plan(stage.uri)
    changed(stage.plan_uri, **{field: name})
    assert manifest.read_plan(stage.uri) == ()


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_promoted_draft_is_a_folder_of_the_root(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    entry = {
        **dict.fromkeys(promotion.Promotion.__dataclass_fields__, "x"),
        "draft": name,
        "evaluation": "e" * 16,
        "reasons": [],
        "figures": [],
    }
    path = Path(promotion.pointer_uri(str(tmp_path / "root"), "org/model"))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"history": [], "promoted": entry}))
    with pytest.raises(StageFailed, match="is no key"):
        serve_command(str(tmp_path / "root"))
    path.write_text(json.dumps({"history": [], "promoted": {**entry, "draft": "d" * 16}}))
    assert promotion.read_pointer(str(tmp_path / "root"), "org/model").promoted is not None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_checkpoint_is_made_of_files_of_its_folder(tmp_path: Path, name: str) -> None:
    ref, body = CheckpointRef(3, 1), b"x"
    folder = Path(ref.uri(str(tmp_path)))
    folder.mkdir(parents=True)
    said = {"size_bytes": 1, "sha256": sha256_hex(body)}
    for one in SHARED_FILES:
        (folder / one).write_bytes(body)
    (folder / COMMIT_FILE).write_text(json.dumps({"files": dict.fromkeys(SHARED_FILES, said)}))
    assert checkpoint_files.damage(str(tmp_path), ref) is None
    (folder / COMMIT_FILE).write_text(json.dumps({"files": dict.fromkeys([*SHARED_FILES, name], said)}))
    assert "which is no file beside it" in (checkpoint_files.damage(str(tmp_path), ref) or "")
    with pytest.raises(ValueError, match="no file beside it"):
        checkpoint_files.read_files(str(tmp_path), ref)


# --- events ---


def test_an_event_names_a_profile_and_nothing_else() -> None:
    """What the server makes of the watch's trigger, whatever the payload holds."""
    found = yaml.safe_load((project_home() / "prefect.yaml").read_text())["deployments"]
    (trigger,) = next(one for one in found if one["name"] == "watch")["triggers"]
    for profile in ("smoke", 'smoke", "root": "/etc', {"root": "/etc"}):
        config = {"profile": profile, "root": "/etc", "vllm": {"python": "/tmp/evil"}}
        event = SimpleNamespace(payload={"config": config, "first": "remember", "parameters": {}})
        given = hydrate(trigger["parameters"], HydrationContext(render_jinja=True, jinja_context={"event": event}))
        assert given == {"first": "start", "config": {"profile": str(profile)}}
        if profile != "smoke":
            with pytest.raises(InputError, match="there is no profile"):
                PipelineConfig.model_validate(given["config"])


# --- code ---


def sources() -> Iterator[tuple[str, ast.AST]]:
    home = project_home()
    for room in ("flows", "tasks", "infra"):
        for path in sorted((home / room).rglob("*.py")):
            yield path.relative_to(home).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def dangers(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN and not (name in PICKLES and called.startswith("pickle.")):
                yield f"{name}:{node.lineno} calls {called}"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if any(keyword.arg == wrong and value is bad for wrong, bad in FORBIDDEN_ARGUMENTS):
                    yield f"{name}:{node.lineno} has {keyword.arg}={value}"
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield f"{name}:{node.lineno} listens on every interface"


def test_the_code_executes_unpickles_and_trusts_nothing_foreign() -> None:
    assert [danger for name, tree in sources() for danger in dangers(name, tree)] == []
    bad = (
        "torch.load(p)\nsubprocess.run(c, shell=True)\nf(trust_remote_code=True)\nserve('0.0.0.0')\npickle.loads(x)"
    )
    assert len(list(dangers("infra/shards.py", ast.parse(bad)))) == 5
