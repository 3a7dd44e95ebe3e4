"""The whole pipeline with a SIGKILL in the middle of its stages, and where the time goes.

    .venv/bin/python benchmarks/gpu_pipeline.py [CONFIG.yaml] [--set a.b=value …] [--kill STAGE,…] [--seconds N]
        [--logs FOLDER] [--verify] [--bare]

`draftsmith run CONFIG.yaml` (by default deployments/smoke-gpu.yaml) as a process of its own. In each stage of
`--kill` (responses, hidden_states and drafts) that process, and nothing else, is killed once, when a third of the
shards or the first checkpoint is committed; the same command then goes on at once. Each stage has its row as soon
as it is complete, so a run that is cut short (`--seconds`, or a limit of the machine's) still shows all before. Run
again over the same root, it goes on, and kills no more where the folder of logs says that it has.

What a row holds, in seconds of the wall clock; a stage begins where the one before ends:

- `again`: from the kill until the next process is back at the stage: interpreter, Prefect's server, what is reused
- `start`: of vLLM until it answers, or of the trainer until its first step, compilation included; all of them, and
  the verifier's conversion
- `work`: the rest. `idle` of it is where nvidia-smi's samples (two a second) say that no kernel ran: requests on
  their way, checks, encoding, commits, pauses between measurements
- `tokens/s`: tokens of the stage (generated, extracted, trained) over `work`; `GPU`: mean utilization over all
- `kept`: shards that were committed at the kill, and are still the same ones at the end

The last line: seconds in all, and which share of them was waiting: starts, orchestration (`again`, the pipeline's
first start and its end) and idle work. `--bare`: rates of vLLM's offline engine over the same prompts and sampling,
in the same minutes, and the ratio of generation to it. `--verify`: every committed shard read again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.config import PipelineConfig, load_config
from flows.resolve import resolve
from infra import manifest, storage
from infra.extraction.budget import ENCODE_SECONDS, EXTRACT_SECONDS
from infra.locations import log_file
from infra.manifest import StageRef
from infra.schemas import STAGES
from infra.tables import read_table
from infra.training.checkpoint_files import COMMIT_FILE
from infra.verifiers.verifier import materialize
from infra.vllm_config import VllmConfig, engine_environment, engine_flags

HOME = Path(__file__).resolve().parents[1]
KILLABLE = ("responses", "hidden_states", "drafts")
KILL_AT_SHARE = 1 / 3
POLL_SECONDS = 0.1
SAMPLE_SECONDS = 0.4
IDLE_PERCENT = 1.0
END_SECONDS = 25.0
NUM_BARE_PROMPTS = 2048
BARE_SECONDS, BARE_SECONDS_LEAST = 600.0, 45.0

READY = re.compile(r"(?:vLLM serves .* after|extraction engine .* is ready after) (\d+) s\.")
CONVERTING, CONVERTED = re.compile(r"Converting \S+ into"), re.compile(r"Task run 'materialize .* Finished")
TRAINER_STARTS = re.compile(r"Training \S+ with \d+ rank")
TRAINER_READY = re.compile(r"Training from step (\d+) of (\d+)")
STAGE_BEGINS = re.compile(r"(\w+)/[0-9a-f]+: \d+ of \d+ shards are done")

# Run by vLLM's interpreter: the same prompts and sampling without anything around the engine.
BARE = """
import json, sys, time
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
given = json.load(sys.stdin)
parsed, _ = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(given["flags"])
args = EngineArgs.from_cli_args(parsed)
llm = LLM.from_engine_args(args)
sampling = SamplingParams(**given["sampling"])
prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
llm.generate(prompts[:64], sampling, use_tqdm=False)
for _ in range(2):
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    print("RESULT", sum(len(one.outputs[0].token_ids) for one in outputs), seconds, flush=True)
"""


@dataclass
class Sampler:
    """GPU utilization and memory, two samples a second; nothing where there is no nvidia-smi."""

    samples: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, percent of the time in which a kernel ran, GiB taken), means over the GPUs."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(10)

    def _sample(self, ended: threading.Event) -> None:
        query = "--query-gpu=utilization.gpu,memory.used"
        while not ended.wait(SAMPLE_SECONDS):
            try:
                asked = subprocess.run(
                    ["nvidia-smi", query, "--format=csv,noheader,nounits"],
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=20,
                )
                pairs = [[float(value) for value in line.split(",")] for line in asked.stdout.splitlines()]
            except FileNotFoundError:
                return
            except (subprocess.SubprocessError, ValueError):
                continue
            if pairs:
                percent, mib = (statistics.fmean(values) for values in zip(*pairs, strict=True))
                self.samples.append((time.time(), percent, mib / 1024))

    def within(self, spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """(percent, GiB) of the samples in these spans."""
        return [(at[1], at[2]) for at in self.samples if any(since <= at[0] < until for since, until in spans)]


@dataclass
class Run:
    """The pipeline's process, started as often as it is killed, and what its log says."""

    command: Sequence[str]
    log: Path
    events: list[tuple[float, str]] = field(default_factory=list)
    """(time, line) of each line of the log."""
    started: float = 0.0
    process: subprocess.Popen[str] | None = None
    last_line: str = ""

    def start(self) -> None:
        self.started = time.time()
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=HOME
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self.log.open("a") as log:
            for line in process.stdout:
                self.events.append((time.time(), line.rstrip()))
                self.last_line = line.rstrip() or self.last_line
                log.write(line)
                log.flush()

    def kill(self) -> float:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return time.time()

    def end(self) -> None:
        """Ask it to end; kill it where that takes too long."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass
class Kill:
    """One kill: when, of which stage, with what committed."""

    at: float
    committed: dict[str, str]
    planned: int
    back: float | None = None


Span = tuple[float, float]


def united(spans: Sequence[Span]) -> list[Span]:
    """The same time without overlaps."""
    found: list[Span] = []
    for since, until in sorted(spans):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(until, found[-1][1]))
        elif until > since:
            found.append((since, until))
    return found


def without(span: Span, taken: Sequence[Span]) -> list[Span]:
    """What is left of a span."""
    left, since = [], span[0]
    for begin, end in united(taken):
        if begin > since:
            left.append((since, min(begin, span[1])))
        since = max(since, end)
    if since < span[1]:
        left.append((since, span[1]))
    return left


def length(spans: Sequence[Span]) -> float:
    return sum(until - since for since, until in spans)


class Table:
    """The rows, printed as their stages end."""

    FORMAT = "{:14} {:>7} {:>6} {:>6} {:>7} {:>6} {:>10} {:>9} {:>5} {:>6} {:>8}"

    def __init__(self, run: Run, sampler: Sampler, kills: dict[str, Kill]) -> None:
        self._run, self._sampler, self._kills = run, sampler, kills
        self.rows: dict[str, dict[str, float]] = {}
        heads = ("stage", "seconds", "again", "start", "work", "idle", "tokens", "tokens/s", "GPU", "GiB", "kept")
        say(self.FORMAT.format(*heads))

    def add(self, stage: StageRef, span: Span, *, complete: bool) -> None:
        kill = self._kills.get(stage.stage)
        again = [(kill.at, kill.back or span[1])] if kill and span[0] <= kill.at <= span[1] else []
        starts = [span_ for span_ in self._starts() if span_[1] > span[0] and span_[0] < span[1]]
        starts = [each for one in starts for each in without((max(one[0], span[0]), min(one[1], span[1])), again)]
        work = without(span, [*again, *starts])
        tokens = tokens_of(stage) if complete else 0
        inside, busy = self._sampler.within([span]), self._sampler.within(work)
        idle = length(work) * (sum(p < IDLE_PERCENT for p, _ in busy) / len(busy)) if busy else 0.0
        row = {
            "seconds": span[1] - span[0],
            "again": length(again),
            "start": length(united(starts)),
            "work": length(work),
            "idle": idle,
            "tokens": tokens,
        }
        self.rows[stage.stage] = row
        shown = [f"{row[name]:.1f}" for name in ("seconds", "again", "start", "work")]
        shown.append(f"{idle:.1f}" if busy else "-")
        shown += [f"{tokens:,}" if tokens else "-", f"{tokens / row['work']:,.0f}" if tokens and work else "-"]
        shown.append(f"{statistics.fmean(p for p, _ in inside):.0f}%" if inside else "-")
        shown.append(f"{max(gib for _, gib in inside):.1f}" if inside else "-")
        shown.append(kept(stage, kill) if kill else "-")
        say(self.FORMAT.format(stage.stage + ("" if complete else " (cut)"), *shown))

    def _starts(self) -> list[Span]:
        found, trainer, converting = [], None, None
        for at, line in list(self._run.events):
            if match := READY.search(line):
                found.append((at - int(match[1]), at))
            elif CONVERTING.search(line):
                converting = at
            elif converting is not None and CONVERTED.search(line):
                found.append((converting, at))
                converting = None
            elif TRAINER_STARTS.search(line):
                trainer = at
            elif trainer is not None and TRAINER_READY.search(line):
                found.append((trainer, at))
                trainer = None
        return united(found)


def kept(stage: StageRef, kill: Kill) -> str:
    """How many of what was committed at the kill is unchanged, of how many."""
    now = committed(stage)
    if stage.stage == "drafts":  # older checkpoints give way to newer ones
        return f"{len(kill.committed)} ckpt"
    return f"{sum(now.get(name) == what for name, what in kill.committed.items())}/{len(kill.committed)}"


def committed(stage: StageRef) -> dict[str, str]:
    """Name and content of every commit of a stage: shard records, or checkpoints of a draft."""
    if stage.stage == "drafts":
        names = storage.list_sizes(storage.join(stage.uri, "checkpoints"))
        return {name: "" for name in names if name.endswith(COMMIT_FILE)}
    plan = manifest.read_plan(stage.uri)
    return {name: record.sha256 for name, record in manifest.read_record_files(stage.uri, plan).items()}


def num_committed(stage: StageRef) -> int:
    """The same counted from one listing."""
    if stage.stage == "drafts":
        return len(committed(stage))
    names = storage.list_sizes(storage.join(stage.uri, "shards"))
    return sum(name.endswith(".json") for name in names)


def tokens_of(stage: StageRef) -> int:
    """Tokens that a complete stage generated, extracted or trained on (every pass counted)."""
    if stage.stage == "responses":
        records = manifest.read_records(stage.uri).values()
        tables = (read_table(stage.uri, record) for record in records)
        return sum(sum(table["num_completion_tokens"].to_pylist()) for table in tables)
    if stage.stage == "hidden_states":
        return sum(record.extra["num_tokens"] for record in manifest.read_records(stage.uri).values())
    if stage.stage == "drafts":
        return round(sum(line["tokens_per_second"] * line["seconds"] for line in training_lines(stage)))
    return 0


def training_lines(draft: StageRef) -> list[dict[str, Any]]:
    """The draft's lines of training metrics."""
    text = storage.get(storage.join(draft.uri, "metrics.jsonl")).decode()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == "train"]


def say_training(draft: StageRef) -> None:
    """The trainer's own figures: speed, and the share of its steps' time in which it waited for input."""
    lines = training_lines(draft)
    rate = statistics.median(line["tokens_per_second"] for line in lines)
    waits = [line["input_wait_seconds"] for line in lines]
    share = statistics.median(line["input_wait_seconds"] / line["seconds"] for line in lines)
    say(
        f"  the trainer's own lines: median {rate:,.0f} tokens/s, input waited for {share:.1%} of the time "
        f"(at most {max(waits):.1f} s before a line); loss {lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}, "
        f"predicted acceptance length {lines[-1]['acceptance_length']:.2f}"
    )


def say_extraction(stage: StageRef) -> None:
    """What its shards' records say: seconds of the engine, and of checks and encoding beside it."""
    records = manifest.read_records(stage.uri).values()
    engine, encode = (
        sum(one.extra.get(name, 0.0) for one in records) for name in (EXTRACT_SECONDS, ENCODE_SECONDS)
    )
    size = sum(one.size_bytes for one in records)
    say(
        f"  by its shards' records: the engine {engine:.1f} s, checks and encoding {encode:.1f} s (of several "
        f"shards at once), {size / 1e9:.2f} GB"
    )


def say_evaluation(stage: StageRef) -> None:
    """One line for each row of the results."""
    (record,) = [one for one in manifest.read_records(stage.uri).values() if one.data == "results.parquet"]
    for row in read_table(stage.uri, record).to_pylist():
        accepted = row["acceptance_length"]
        say(
            f"  T={row['temperature']:g} x{row['concurrency']:<4} {row.get('label') or row['method']:12} "
            f"{row['output_tokens_per_second']:8,.0f} tokens/s  speed-up {row['speedup']:.2f} "
            f"({row['speedup_low']:.2f} to {row['speedup_high']:.2f})  acceptance length "
            + ("-" if accepted is None else f"{accepted:.3f}")
        )


def say(line: str) -> None:
    print(line, flush=True)


DETAILS = {"hidden_states": say_extraction, "drafts": say_training, "evaluations": say_evaluation}


class Kills:
    """Which stages are still to be killed, remembered across runs of this script, and when to do it."""

    def __init__(self, names: Sequence[str], memory: Path) -> None:
        self._memory = memory
        self._done: list[str] = json.loads(memory.read_text()) if memory.exists() else []
        self._names = [name for name in names if name not in self._done]
        self.made: dict[str, Kill] = {}

    def due(self, stage: StageRef) -> bool:
        """Whether it is the middle of a stage that is to be killed."""
        if stage.stage not in self._names or stage.stage in self.made:
            return False
        plan = manifest.read_plan(stage.uri)
        if not plan:
            return False
        needed = 1 if stage.stage == "drafts" else max(1, round(len(plan) * KILL_AT_SHARE))
        return num_committed(stage) >= needed

    def note(self, stage: StageRef, at: float) -> None:
        kill = self.made[stage.stage] = Kill(at, committed(stage), len(manifest.read_plan(stage.uri)))
        self._done.append(stage.stage)
        self._memory.write_text(json.dumps(self._done))
        what = "checkpoint(s)" if stage.stage == "drafts" else f"of {kill.planned} shards"
        say(f"  SIGKILL in {stage.stage}: {len(kill.committed)} {what} committed; the same command again")


def back_at(run: Run, since: float) -> float | None:
    """When the process started at `since` has come back to the stage that its predecessor was killed in."""
    for at, line in list(run.events):
        if at > since and (STAGE_BEGINS.search(line) or "Starting vLLM" in line or TRAINER_STARTS.search(line)):
            return at
    return None


def follow(
    config: PipelineConfig, run: Run, sampler: Sampler, kills: Kills, deadline: float
) -> tuple[Table, float, list[Span]]:
    """Run the pipeline to its end, or to the deadline. Returns the table, the seconds, and the time in no stage."""
    stages = resolve(config)
    names = [name for name in STAGES if not storage.exists(stages[name].manifest_uri)]
    table = Table(run, sampler, kills.made)
    planned = {name for name in names if storage.exists(stages[name].plan_uri)}  # by an earlier run
    began = time.time()
    run.start()
    since: float | None = None  # the present stage's begin
    outside: list[Span] = []
    while names:
        stage = stages[names[0]]
        assert run.process is not None
        now = time.time()
        if since is None and (back_at(run, began) or (names[0] not in planned and storage.exists(stage.plan_uri))):
            since = now
            outside.append((began, now))
        kill = kills.made.get(stage.stage)
        if kill is not None and kill.back is None:
            kill.back = back_at(run, kill.at)
        if storage.exists(stage.manifest_uri):
            since = since or began
            table.add(stage, (since, now), complete=True)
            if stage.stage in DETAILS:
                DETAILS[stage.stage](stage)
            since = now
            names.pop(0)
        elif kills.due(stage):
            kills.note(stage, run.kill())
            run.start()
        elif now > deadline or run.process.poll() is not None:
            run.end()
            table.add(stage, (since or began, time.time()), complete=False)
            why = "time is up" if now > deadline else f"the run ended with {run.process.poll()}"
            say(f"  {why} in {stage.stage}; the last line of its log: {run.last_line}")
            return table, time.time() - began, outside
        time.sleep(POLL_SECONDS)
    if since is None:
        since = time.time()  # all was there
    assert run.process is not None
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(120)
    outside.append((since, time.time()))
    say(f"  the run ended with {run.process.poll()}: {run.last_line}")
    return table, time.time() - began, outside


def bare_rates(config: PipelineConfig, stages: dict[str, StageRef], deadline: float) -> list[float]:
    """Tokens/s of vLLM's offline engine with the generation's prompts, sampling and limits; two passes."""
    seconds = min(deadline - time.time(), BARE_SECONDS)
    if seconds < BARE_SECONDS_LEAST:
        say(f"  no time for bare vLLM: {seconds:.0f} s left")
        return []
    records = list(manifest.read_records(stages["responses"].uri).values())
    rows = [row for record in records for row in read_table(stages["responses"].uri, record).to_pylist()]
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in rows if row["num_prompt_tokens"]]
    verifier = materialize(config.verifier)
    vllm: VllmConfig = config.vllm.for_generation()
    sampling = {"temperature": config.generate.temperature, "top_p": config.generate.top_p}
    given = {
        # As many tokens a step as a server takes, so that what it has compiled is found again.
        "flags": [*engine_flags(vllm, model_path=verifier.path), "--max-num-batched-tokens=8192"],
        "sampling": {**sampling, "max_tokens": config.generate.max_tokens},
        "prompts": prompts[:NUM_BARE_PROMPTS],
    }
    environment = {**os.environ, **engine_environment(vllm, model_path=verifier.path)}
    log = log_file("benchmark", "gpu-pipeline", "bare")
    log.parent.mkdir(parents=True, exist_ok=True)
    # In a session of its own, whose processes all end with it.
    with log.open("wb") as file, tempfile.TemporaryFile() as asked:
        asked.write(json.dumps(given).encode())
        asked.seek(0)
        process = subprocess.Popen(
            [vllm.interpreter(), "-c", BARE],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
        try:
            answer = process.communicate(timeout=seconds)[0].decode()
        except subprocess.TimeoutExpired:
            answer = ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line.split() for line in answer.splitlines() if line.startswith("RESULT")]
    if not lines:
        say(f"  bare vLLM gave no figures; its log is {log}")
    return [int(tokens) / float(took) for _, tokens, took in lines]


def last_line(table: Table, seconds: float, outside: Sequence[Span], bare: Sequence[float]) -> str:
    rows = table.rows.values()
    starts, again, idle = (sum(row[name] for row in rows) for name in ("start", "again", "idle"))
    shares = {"start": starts, "orchestration": again + length(outside), "idle_work": idle}
    said = [f"seconds={seconds:.1f}"] + [f"{name}_share={what / seconds:.3f}" for name, what in shares.items()]
    if bare and "responses" in table.rows and (work := table.rows["responses"]["work"]):
        rate = table.rows["responses"]["tokens"] / work
        said += [f"bare_generation={max(bare):.0f}", f"ratio_generation={rate / max(bare):.3f}"]
    return " ".join(said)


def main() -> int:
    options = arguments()
    options.config, options.logs = options.config.resolve(), options.logs.resolve()
    os.chdir(HOME)  # where the pipeline runs, so that a relative root is the same place
    config = load_config(str(options.config), options.set)
    options.logs.mkdir(parents=True, exist_ok=True)
    kill = [name for name in options.kill.split(",") if name]
    if unknown := set(kill) - set(KILLABLE):
        raise SystemExit(f"--kill: {', '.join(unknown)}; possible are {', '.join(KILLABLE)}")
    command = [sys.executable, "-m", "flows.cli", "run", str(options.config)]
    command += [part for one in options.set for part in ("--set", one)]
    run, sampler = Run(command, options.logs / "pipeline.log"), Sampler()
    kills = Kills(kill, options.logs / "kills.json")
    deadline = time.time() + options.seconds
    try:
        with sampler.running():
            table, seconds, outside = follow(config, run, sampler, kills, deadline)
    finally:
        run.end()
    complete = run.process is not None and run.process.poll() == 0
    if options.verify and complete:
        verify = [sys.executable, "-m", "flows.cli", "verify", config.root]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        say(f"  {(done.stdout or done.stderr).strip().splitlines()[-1]}")
    say(last_line(table, seconds, outside, []))
    if options.bare and complete and (rates := bare_rates(config, resolve(config), deadline)):
        say(last_line(table, seconds, outside, rates))
    return 0 if complete else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the pipeline under kills and say where its time goes.")
    parser.add_argument("config", nargs="?", type=Path, default=HOME / "deployments" / "smoke-gpu.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="as `draftsmith run` has it"
    )
    parser.add_argument("--kill", default=",".join(KILLABLE), help="stages to kill the run in, separated by commas")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the run after so long")
    parser.add_argument("--logs", type=Path, default=Path("data/gpu-pipeline"), help="folder of the pipeline's log")
    parser.add_argument("--verify", action="store_true", help="read every committed shard again at the end")
    parser.add_argument("--bare", action="store_true", help="measure vLLM's offline engine too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
