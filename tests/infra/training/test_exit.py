"""How a rank ends: by its exit code alone, since what it holds may take for ever to be taken apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infra.training.config import TrainConfig
from infra.training.progress import EXIT_RESUME, parse
from tests.fakes.training_run import write_spec

pytestmark = pytest.mark.seconds

# A process group's destructor has been seen to wait for a thread that waits for Python's lock.
RANK = """
import sys, time
import infra.training.__main__ as program
import infra.training.loop as loop
from infra.errors import InputError, StageFailed

class Trainer:
    step = 7
    def __init__(self, spec, ranks): pass
    def __del__(self): time.sleep(600)
    def run(self):
        {ends}

loop.Trainer = Trainer
sys.exit(program.main([{spec!r}]))
"""


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("return 'done'", 0, ("done", None)),
        ("return 'stopped'", EXIT_RESUME, ("stopped", None)),
        ("raise StageFailed('no')", 1, ("failed", "StageFailed")),
        ("raise InputError('train.epochs', 'no')", 2, ("failed", "InputError")),
        ("raise RuntimeError('a peer is gone')", 1, None),
    ],
)
def test_a_rank_ends_though_what_it_holds_never_would(
    ends: str, code: int, says: tuple[str, str | None] | None, tmp_path: Path
) -> None:
    path = tmp_path / "spec.json"
    path.write_text(write_spec(tmp_path, TrainConfig(num_steps=1, total_seq_len=64)).model_dump_json())
    done = subprocess.run(
        [sys.executable, "-c", RANK.format(ends=ends, spec=str(path))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    lines = [found for line in done.stdout.splitlines() if (found := parse(line))]
    if says is None:
        assert not lines
        assert "RuntimeError: a peer is gone" in done.stderr
    else:
        assert [(line["kind"], line.get("error_type")) for line in lines] == [says]
