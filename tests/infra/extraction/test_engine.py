from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from infra.errors import InfrastructureError, InputError, ServerError
from infra.extraction import rows as extraction_rows
from infra.extraction.engine import (
    WORKER,
    ExtractConfig,
    ExtractionEngine,
    ExtractSample,
    StreamTimes,
    build_shard,
    resolve_layer_ids,
    samples_of,
)
from infra.extraction.staging import Staging
from infra.hidden_states import decode
from infra.processes import living
from infra.schemas import RESPONSES
from infra.state_checks.checks import ChecksConfig, StateChecks
from infra.verifiers.verifier import Verifier
from infra.vllm_config import VllmConfig
from tests.fakes.extract_worker import HIDDEN_SIZE, value

FAKE = Path(__file__).parents[2] / "fakes" / "extract_worker.py"
VERIFIER = Verifier(
    name="tiny",
    revision="abc123",
    path=Path("/nowhere"),
    hidden_size=HIDDEN_SIZE,
    num_hidden_layers=30,
    vocab_size=1000,
    max_position_embeddings=2048,
)
LAYER_IDS = [2, 15, 27, 30]
# What the staged file of a sample of ten tokens takes at most, more or less.
FILE = 10 * (len(LAYER_IDS) * HIDDEN_SIZE * 2 + 8) + 1024


@pytest.fixture
def token(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"test-{os.getpid()}-{abs(hash(request.node.name)):x}"
    yield name
    assert living(name) == [], "a process was left behind"
    assert not staging(name).exists(), "states were left behind"


def staging(token: str) -> Path:
    return Path(tempfile.gettempdir()) / f"draftsmith-extract-{token}"


def engine(
    token: str,
    tmp_path: Path,
    *,
    fault: str = "",
    worker: Path = FAKE,
    shared: Staging | None = None,
    **config: Any,
) -> ExtractionEngine:
    vllm = VllmConfig(python=sys.executable, environment={"FAKE_FAULT": fault}, startup_timeout_seconds=30.0)
    return ExtractionEngine(
        ExtractConfig(**config),
        vllm,
        VERIFIER,
        log_path=tmp_path / "engine.log",
        token=token,
        worker=worker,
        staging=shared,
    )


def staged(token: str) -> list[Path]:
    return [path for path in staging(token).rglob("*") if path.is_file()]


def gib(num_bytes: int) -> float:
    return num_bytes / 2**30


def sample(name: str, num_tokens: int = 10) -> ExtractSample:
    return ExtractSample(name, [(3 * len(name) + position) % 900 for position in range(num_tokens)])


def expected(ids: Any) -> torch.Tensor:
    """[tokens, layers, hidden]: what the fake worker answers."""
    shape = [(t, p) for p, t in enumerate(ids)]
    states = [[[value(t, p, layer, h) for h in range(HIDDEN_SIZE)] for layer in range(4)] for t, p in shape]
    return torch.tensor(states).to(torch.bfloat16)


@pytest.mark.parametrize("ids", [[2, 15, 27], [30], [0, 15, 30], [15, 2, 30], [2, 2, 30], [2, 31], []])
def test_layer_ids_that_do_not_fit_the_verifier_are_refused(ids: list[int]) -> None:
    with pytest.raises(InputError, match=r"extract\.layer_ids: .*30"):
        resolve_layer_ids(ExtractConfig(layer_ids=ids), VERIFIER)


def test_layer_ids_by_default_and_as_given() -> None:
    assert resolve_layer_ids(ExtractConfig(), VERIFIER) == LAYER_IDS
    assert resolve_layer_ids(ExtractConfig(layer_ids=[1, 30]), VERIFIER) == [1, 30]


def test_what_changes_the_states_enters_the_key_and_nothing_else() -> None:
    assert (
        ExtractConfig(
            engines=2,
            gpu_sets=[[0], [1]],
            timeout_seconds=5,
            staging_folder="/x",
            staging_gib=1,
            max_failed_share=0,
        ).content()
        == {}
    )
    assert ExtractConfig(layer_ids=[1, 30]).content() == {"layer_ids": [1, 30]}
    assert ExtractConfig(checks=ChecksConfig(stage_margin_nats=9)).content() == {}
    assert ExtractConfig(checks=ChecksConfig(positions=8)).content() == {"checks": {"positions": 8}}


@pytest.mark.parametrize("staging_gib", [gib(2 * FILE), gib(5 * FILE), None])
def test_one_engine_serves_many_shards(token: str, tmp_path: Path, staging_gib: float | None) -> None:
    shards = {f"{index:05d}": [sample(f"s{index}-{n}", 5 + n) for n in range(7)] for index in range(3)}
    with engine(token, tmp_path, staging_gib=staging_gib) as running:
        pids = living(token)
        for shard, samples in shards.items():
            results = running.extract(shard, samples)
            assert [(result.sample_id, result.error) for result in results] == [
                (s.sample_id, None) for s in samples
            ]
            # Still readable, though nothing is staged any more.
            assert staged(token) == []
            for result, asked in zip(results, samples, strict=True):
                assert result.hidden_states is not None
                assert torch.equal(result.hidden_states, expected(asked.input_ids))
        assert living(token) == pids


def test_a_sample_larger_than_the_staging_names_the_field(token: str, tmp_path: Path) -> None:
    with engine(token, tmp_path, staging_gib=gib(FILE - 100)) as running:
        with pytest.raises(InputError, match=r"extract\.staging_gib: sample a of 10 tokens .* raise it"):
            running.extract("00000", [sample("a")])
        assert running.extract("00000", [sample("b", 2)])[0].error is None, "others go on"


def test_a_stopped_engine_gives_its_staging_back(token: str, tmp_path: Path) -> None:
    shared = Staging(token, None, 4 * FILE)
    shared.open()
    try:
        for _ in range(3):  # lives of one engine
            with engine(token, tmp_path, shared=shared) as running, pytest.raises(ServerError, match="code 137"):
                running.extract("00000", [sample("a"), sample("die-1"), sample("b"), sample("c")])
            assert staged(token) == []
        with engine(token, tmp_path, shared=shared) as running:
            assert [r.error for r in running.extract("00000", [sample(f"s{n}") for n in range(9)])] == [None] * 9
        assert 0 < shared.peak_bytes <= shared.limit_bytes
    finally:
        shared.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nan", "not finite: layer 2, token 1"),
        ("inf", "not finite: layer 30, token 9"),
        ("zero", "all zero: layer 2, token 1"),
        ("constant", "constant: layer 2, token 0 (10 of 10 tokens)"),
        ("same", "constant: the same at every token of layer 2"),
        ("short", "length: states of shape [6, 4, 8] for 10 tokens"),
        ("ids", "ids: vLLM saw 10 that are not the 10 of the response"),
        ("torn", "the staged file cannot be read"),
        ("long", "4096 tokens; extraction takes 1 to 2047"),
    ],
)
def test_a_bad_sample_is_its_own_error(token: str, tmp_path: Path, fault: str, said: str) -> None:
    with engine(token, tmp_path) as running:
        before, bad, after = running.extract("00000", [sample("a"), sample(f"{fault}-1"), sample("b")])
    assert bad.error is not None
    assert said in bad.error
    assert bad.hidden_states is None
    assert before.error is None
    assert after.error is None


def test_an_engine_that_dies_is_an_error_with_its_last_words(token: str, tmp_path: Path) -> None:
    with engine(token, tmp_path) as running:
        assert running.extract("00000", [sample("a")])[0].error is None
        with pytest.raises(ServerError, match=r"ended with code 137[\s\S]*the fake engine has died"):
            running.extract("00001", [sample("a"), sample("die-1")])
        with pytest.raises(ServerError, match="ended with code 137"):
            running.extract("00001", [sample("a")])


def test_an_engine_that_hangs_is_ended(token: str, tmp_path: Path) -> None:
    with engine(token, tmp_path, timeout_seconds=0.5) as running:
        with pytest.raises(ServerError, match="did not answer within"):
            running.extract("00000", [sample("hang-1")])
        assert living(token) == []


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("refuse", InputError, r"vllm\.python: this vLLM is too old"),
        ("die", ServerError, "ended with code 1[\\s\\S]*ValueError: no such model"),
        ("garbage", ServerError, "wrote a line that is no reply"),
    ],
)
def test_an_engine_that_does_not_start(
    token: str, tmp_path: Path, fault: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said), engine(token, tmp_path, fault=fault):
        pass


def test_the_real_worker_refuses_an_interpreter_without_vllm(token: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no vLLM; extraction needs vLLM .*0\.32\.0") as caught:
        engine(token, tmp_path, worker=WORKER).__enter__()
    assert "\n" not in str(caught.value)


def test_the_real_worker_keeps_stdout_for_replies() -> None:
    program = (
        "import os, runpy, sys\n"
        f"worker = runpy.run_path({str(WORKER)!r})\n"
        "replies = worker['_take_stdout']()\n"
        "print('from Python', flush=True)\n"
        "os.write(1, b'from C\\n')\n"
        "os.system('echo from a child')\n"
        "worker['_reply'](replies, {'ready': 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == '{"ready": 1}\n'
    assert done.stderr.splitlines() == ["from Python", "from C", "from a child"]


def test_stop_from_another_thread_ends_the_wait(token: str, tmp_path: Path) -> None:
    with engine(token, tmp_path) as running:
        stopper = threading.Timer(0.5, running.stop)
        stopper.start()
        started = time.monotonic()
        with pytest.raises(ServerError, match="ended"):
            running.extract("00000", [sample("hang-1")])
        assert time.monotonic() - started < 20
        stopper.join()


def test_a_stream_given_up_disturbs_no_other(token: str, tmp_path: Path) -> None:
    with engine(token, tmp_path, staging_gib=gib(2 * FILE)) as running:
        given_up = running.stream("00000", [sample(f"a{n}") for n in range(5)])
        next(given_up)
        given_up.close()
        assert [result.sample_id for result in running.extract("00001", [sample("b"), sample("c")])] == ["b", "c"]
        assert staged(token) == []


def test_two_shards_at_once(token: str, tmp_path: Path) -> None:
    found: dict[str, list[str | None]] = {}

    def work(shard: str) -> None:
        samples = [sample(f"{shard}-{n}") for n in range(20)]
        results = running.extract(shard, samples)
        found[shard] = [
            result.error
            if result.hidden_states is None
            else str(torch.equal(result.hidden_states, expected(asked.input_ids)))
            for result, asked in zip(results, samples, strict=True)
        ]

    with engine(token, tmp_path, staging_gib=gib(2 * FILE)) as running:
        threads = [threading.Thread(target=work, args=(shard,)) for shard in ("x", "y", "z")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == {shard: ["True"] * 20 for shard in ("x", "y", "z")}


def test_a_full_staging_disk_is_told_before_it_overflows(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(token, tmp_path) as running:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
        with pytest.raises(InfrastructureError, match=r"has 1 MiB free.*extract\.staging_folder"):
            running.extract("00000", [sample("a")])


KILLED_PARENT = """
import sys, time
from pathlib import Path
from tests.infra.extraction.test_engine import FILE, engine, gib, sample
with engine(sys.argv[1], Path(sys.argv[2]), staging_gib=gib(2 * FILE)) as running:
    stream = running.stream("00000", [sample("a"), sample("hang-1")])
    next(stream)
    print("extracting", flush=True)
    time.sleep(600)
"""


@pytest.mark.seconds
def test_what_a_killed_run_leaves_is_ended_and_deleted(token: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED_PARENT, token, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"extracting\n"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert staging(token).exists()
    with engine(token, tmp_path) as running:
        assert len(living(token)) == 2  # the guard and the worker of this run alone
        assert running.extract("00000", [sample("b")])[0].error is None


def unjudged(running: ExtractionEngine) -> StateChecks:
    return StateChecks(ChecksConfig(), running.meta, None)


def response(name: str, status: str = "ok", error: str | None = None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(RESPONSES.names)
    ids = [] if status == "failed" else list(sample(name).input_ids)
    row |= {"sample_id": name, "dataset": "d", "domain": "d", "messages": "[]", "status": status, "error": error}
    row |= {"input_ids": ids, "loss_mask": [position >= 4 for position in range(len(ids))]}
    row |= {"num_prompt_tokens": min(4, len(ids)), "num_completion_tokens": max(0, len(ids) - 4)}
    return row | {"temperature": 0.0, "token_source": "server", "latency_seconds": 1.0}


def responses(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=RESPONSES)


def test_every_response_gives_exactly_one_row(token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = responses(
        response("a"),
        response("b", "failed", "timed out after 1800 s"),
        response("nan-1"),
        response("c", "truncated"),
        response("d", "failed", "no token ids"),
    )
    assert [asked.sample_id for asked in samples_of(table)] == ["a", "nan-1", "c"]
    with engine(token, tmp_path) as running:
        times = StreamTimes()
        results = running.stream("00007", samples_of(table), times)
        data, rows, counts, extra = build_shard(table, results, running.meta, unjudged(running))
    assert (rows, counts) == (5, {"ok": 1, "truncated": 1, "failed": 3})
    assert extra["num_tokens"] == 20
    assert times.engine_seconds == pytest.approx(0.1), "as the fake worker says"
    assert times.waited_seconds > 0
    written = pa.parquet.read_table(pa.BufferReader(data)).to_pylist()
    assert [row["sample_id"] for row in written] == ["a", "b", "nan-1", "c", "d"]
    assert [row["status"] for row in written] == ["ok", "failed", "failed", "truncated", "failed"]
    assert written[1]["error"] == "response failed: timed out after 1800 s"
    assert written[1]["input_ids"] == []
    assert written[2]["error"].startswith("not finite: layer 2, token 1")
    assert written[2]["input_ids"] == list(sample("nan-1").input_ids)
    assert "nan-1" in caplog.text
    first, second = decode(data)
    assert (first.sample_id, second.sample_id, second.status) == ("a", "c", "truncated")
    states = expected(sample("a").input_ids)
    assert torch.equal(first.aux_hidden_states, states[:, :3].flatten(1))
    assert torch.equal(first.verifier_last_hidden_states, states[:, 3])
    assert first.loss_mask.tolist() == [False] * 4 + [True] * 6


def test_a_sample_too_large_to_store_is_a_failed_row(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction_rows, "payload_problem", lambda num_tokens, meta: "too large")
    table = responses(response("a"))
    with engine(token, tmp_path) as running:
        results = running.stream("00000", samples_of(table))
        data, _, counts, _ = build_shard(table, results, running.meta, unjudged(running))
    assert counts == {"failed": 1}
    assert list(decode(data)) == []


def test_results_of_other_responses_are_refused(token: str, tmp_path: Path) -> None:
    with engine(token, tmp_path, staging_gib=gib(2 * FILE)) as running:
        results = running.extract("00000", [sample("a"), sample("b")])
        for wrong in (results[:1], list(reversed(results)), [*results, *results]):
            with pytest.raises(ValueError, match="result"):
                build_shard(responses(response("a"), response("b")), wrong, running.meta, unjudged(running))
        # A shard that cannot be built gives its requests up, and the engine goes on.
        stream = running.stream("00001", [sample("x"), sample("y"), sample("z")])
        with pytest.raises(ValueError, match="no result for a"):
            build_shard(responses(response("a")), stream, running.meta, unjudged(running))
        assert running.extract("00002", [sample("c")])[0].error is None
        assert staged(token) == []
