"""The command that serves a promoted speculator, printed without Prefect."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra import manifest, storage
from infra.errors import InputError, StageFailed
from infra.locations import project_home
from infra.manifest import Shard, StageRef
from infra.promotion.gate import PromoteConfig
from infra.promotion.pointer import promote
from infra.promotion.serve_command import serve_command
from tests.fakes.result_rows import measured
from tests.infra.promotion.test_pointer import entry

VERIFIER, COMMIT = "Qwen/Qwen3-8B", "c" * 40
VLLM = {
    "reasoning_parser": "qwen3",
    "tool_parser": "hermes",
    "tensor_parallel_size": 2,
    "environment": {"CUDA_VISIBLE_DEVICES": "0,1", "NOTE": "two words"},
    "extra_args": ["--override-generation-config", '{"top_p": 1.0}'],
}


def exported(root: str, verifier: str = VERIFIER, **vllm: Any) -> str:
    """A root with one export and the run that made it; returns its key."""
    stage = StageRef(root, "drafts", {"schema_version": 1, "of": verifier, "upstream": {}})
    config = {
        "speculators_config": {
            "verifier": {"name_or_path": verifier, "revision": COMMIT},
            "proposal_methods": [{"speculative_tokens": 4}],
        }
    }
    files = {"export/config.json": json.dumps(config).encode(), "export/model.safetensors": b"weights"}
    plan = [Shard(f"{index:05d}", (), {"file": name}) for index, name in enumerate(files)]
    manifest.write_plan(stage, plan)
    for shard in plan:
        manifest.commit_shard(stage, shard, files[shard.extra["file"]], rows=0, status_counts={}, inputs={})
    for run_id, started_at, flags in (("old", "2026-01-01", {"dtype": "float16"}), ("new", "2026-01-02", vllm)):
        said = {
            "run_id": f"{run_id}-{stage.key}",
            "started_at": started_at,
            "keys": {"drafts": stage.key},
            "config": {"vllm": flags, "verifier": {"model": verifier, "trust_remote_code": True}},
        }
        storage.put(storage.join(root, "runs", f"{run_id}-{stage.key}.json"), json.dumps(said).encode())
    return stage.key


def made_promoted(root: str, draft: str, verifier: str = VERIFIER) -> None:
    assert promote(root, verifier, measured(draft), draft, PromoteConfig(), entry(draft, f"new-{draft}")).moved


def test_the_promoted_speculator_is_served_as_its_run_served_it(tmp_path: Path) -> None:
    root = str(tmp_path / "a root")
    draft = exported(root, **VLLM)
    made_promoted(root, draft)
    command = serve_command(root)
    folder = f"{root}/drafts/{draft}/export"
    speculation = {"method": "eagle3", "model": folder, "num_speculative_tokens": 3}
    variables, line = str(command).split(" python -m vllm.entrypoints.openai.api_server ")
    assert shlex.split(variables) == ["CUDA_VISIBLE_DEVICES=0,1", "NOTE=two words"]
    assert shlex.split(line) == [
        *("--model", VERIFIER, "--dtype", "auto", "--tensor-parallel-size", "2"),
        *("--gpu-memory-utilization", "0.9", "--reasoning-parser", "qwen3", "--trust-remote-code"),
        *("--override-generation-config", '{"top_p": 1.0}', "--enable-auto-tool-choice"),
        *("--tool-call-parser", "hermes", "--revision", COMMIT, "--served-model-name", VERIFIER),
        *("--speculative-config", json.dumps(speculation), "--host", "127.0.0.1"),
    ]


def test_any_export_is_served_with_the_length_it_was_trained_for(tmp_path: Path) -> None:
    root = str(tmp_path)
    draft = exported(root)
    for uri in (f"{root}/drafts/{draft}/export", f"{root}/drafts/{draft}/"):
        assert '"num_speculative_tokens": 4' in str(serve_command(uri))


def test_what_cannot_be_served_is_said_in_one_line(tmp_path: Path) -> None:
    root = str(tmp_path)
    with pytest.raises(InputError, match="has no promoted speculator; name another one's export"):
        serve_command(root)
    with pytest.raises(InputError, match=r"no run in .* says how drafts/0{16} was served"):
        serve_command(f"{root}/drafts/{'0' * 16}/export")
    draft, other = exported(root), exported(root, "org/other")
    made_promoted(root, draft)
    made_promoted(root, other, "org/other")
    with pytest.raises(InputError, match=r"--verifier: must be given, as .* Qwen/Qwen3-8B, org/other"):
        serve_command(root)
    assert serve_command(root, "org/other").draft == other
    with pytest.raises(InputError, match="no promoted speculator of org/third"):
        serve_command(root, "org/third")
    Path(root, "drafts", draft, "export", "model.safetensors").write_bytes(b"weight?")
    with pytest.raises(StageFailed, match="the same run again makes it anew"):
        serve_command(root, VERIFIER)


@pytest.mark.s3
def test_an_export_on_s3_is_served_from_a_checked_copy(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    draft = exported(s3_root)
    made_promoted(s3_root, draft)
    copy = tmp_path / "speculators" / draft
    assert str(copy) in str(serve_command(s3_root))
    assert (copy / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.seconds
def test_the_command_loads_no_prefect(tmp_path: Path) -> None:
    draft = exported(str(tmp_path))
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "code = main(['serve-command', *sys.argv[1:]])\n"
        "sys.exit(f'{code}, prefect imported: {\"prefect\" in sys.modules}')\n"
    )
    argv = [sys.executable, "-c", code, f"{tmp_path}/drafts/{draft}/export", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, cwd=project_home())
    assert done.stderr.splitlines()[-1] == "0, prefect imported: False"
    assert json.loads(done.stdout)["arguments"][3:5] == ["--model", VERIFIER]
