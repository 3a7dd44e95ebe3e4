"""What surrounds a training step: feeding it, speculators' trainer, and several ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.training_steps import DEVICE, config_of, peer_config, peer_model, synchronize
from benchmarks.training_workload import Size, Workload
from infra.processes import GuardedProcess, process_token
from infra.training.batch import PackedBatch
from infra.training.config import TrainConfig
from infra.training.data import Schedule, ShardStore, StepBatch, StepLoader, build_index
from infra.training.feed import Feed, input_workers
from infra.training.loop import Trainer
from infra.training.pack_ring import PackLayout, PackRing
from infra.training.progress import Meter, MetricsFile, parse
from infra.training.ranks import Ranks

# At the start of what is fed, before the figure begins: processes start, the ring fills, and in the first epoch (of
# some 32 packs) every shard is compared with its hash.
LEFT_OUT_STEPS = 45
# Made beyond the last step that is timed, so that the input processes are at work to the end.
STEPS_BEYOND = 20
RESIDENT_PACKS = 24
PEER_LEFT_OUT_STEPS = 40
PEER_STEPS = 60
PEER_COPIES = 5  # hard links to each file, so that one epoch is long enough
PEER_WORKERS, PEER_PREFETCH = 12, 2


@functools.cache
def our_trainer(workload: Workload) -> Trainer:
    trainer = Trainer(workload.spec(config_of(workload.size)), Ranks())
    list(trainer.feed.batches(0, 0))  # ends its input processes: what it is fed here is made by others
    return trainer


def resident_rate(workload: Workload) -> float:
    """(b): tokens/s of the loop's steps on batches that are on the device already."""
    trainer, size = our_trainer(workload), workload.size
    upload_rate(trainer)
    batches = []
    with contextlib.closing(_feed(workload, trainer.config, "bf16", RESIDENT_PACKS)) as source:
        for batch in source:
            batches.append(replace(batch, packs=[_states_on_device(pack) for pack in batch.packs]))
    left_out = max(2, size.fed_steps // 10)
    steps = left_out + size.fed_steps
    timing = _timed(trainer, (batches[step % len(batches)] for step in range(steps)), left_out, steps, size)
    print(f"resident ({len(batches)} packs): {timing}")
    return timing.tokens_per_second


def _states_on_device(pack: PackedBatch) -> PackedBatch:
    return replace(
        pack,
        hidden_states=pack.hidden_states.to(DEVICE, copy=True),
        verifier_last_hidden_states=pack.verifier_last_hidden_states.to(DEVICE, copy=True),
        input_ids=pack.input_ids.clone(),
        loss_mask=pack.loss_mask.clone(),
        position_ids=pack.position_ids.clone(),
    )


def upload_rate(trainer: Trainer) -> None:
    """Print how long the upload of a full pack takes by itself, from a ring as the input processes fill it."""
    if DEVICE.type == "cpu":
        return
    meta = trainer.loader.store.read_unchecked(0, lambda file: file.meta)
    ring = PackRing(
        PackLayout(trainer.config.total_seq_len, (len(meta.layer_ids) - 1) * meta.hidden_size, meta.hidden_size), 1
    )
    ring.pin()
    try:
        host = ring.slots[0]
        sources = (host.hidden_states, host.verifier_last_hidden_states)
        targets = [torch.empty_like(source, device=DEVICE) for source in sources]
        times = []
        for _ in range(6):
            began = _mark()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            times.append((began, _mark()))
        synchronize()
        usual = statistics.median(_ms_between(*pair) for pair in times)
        size_bytes = sum(source.nbytes for source in sources)
        print(f"upload by itself: {usual:.1f} ms for a pack of {size_bytes / 1e6:.0f} MB", flush=True)
        del sources, host
    finally:
        ring.close()


def fed_rate(workload: Workload, encoding: str, num_threads: int | None = None) -> float:
    """(b): tokens/s of the loop's steps on batches from this encoding's shards.

    Args:
        num_threads: of the trainer's host computation, if not what the trainer takes.
    """
    trainer = our_trainer(workload)
    usual_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads or usual_threads)
    steps = LEFT_OUT_STEPS + workload.size.fed_steps
    try:
        with contextlib.closing(_feed(workload, trainer.config, encoding, steps + STEPS_BEYOND)) as batches:
            timing = _timed(trainer, batches, LEFT_OUT_STEPS, steps, workload.size)
    finally:
        torch.set_num_threads(usual_threads)
    folder = Path(workload.folder, encoding)
    gigabytes = sum(file.stat().st_size for file in folder.rglob("*.parquet")) / 1e9
    print(f"{encoding}: {timing}; {gigabytes:.1f} GB of shards, {num_threads or usual_threads} host threads")
    return timing.tokens_per_second


def _feed(workload: Workload, config: TrainConfig, encoding: str, steps: int) -> Any:
    store = ShardStore(workload.spec(config, encoding).hidden_states_uri, config.shuffle_window_shards)
    # Each feeding checks its shards, as a trainer that was just started does.
    store.files.group += f" {time.monotonic_ns()}"
    loader = StepLoader(store, Schedule(build_index(store, config), config), config, 0, 1)
    return Feed(loader, DEVICE, input_workers(config, DEVICE) or 2).batches(0, steps)


@dataclass(frozen=True)
class Timing:
    """Where the time of the steps went, as means over them.

    Args:
        wall_ms: of one step.
        input_wait_ms: the host waited for the next pack, as the trainer's metrics say it.
        host_cpu_ms: CPU time of the thread that launches; close to `wall_ms` less the wait, it is what limits.
        process_cpu_ms: CPU time of all threads of the trainer's process.
        pushed_aside: how often a step's host threads lost their core to others.
        device_wait_ms: from the device's end of one step to its having the next pack.
        device_ms: from then to the end of the step, gaps between its kernels included.
        workers: input processes (one of them checks shards).
        worker_cpu_ms: their CPU time for one step, all together.
        megabytes: decoded states of one step.
    """

    tokens_per_second: float
    wall_ms: float
    input_wait_ms: float
    host_cpu_ms: float
    process_cpu_ms: float
    pushed_aside: float
    device_wait_ms: float
    device_ms: float
    workers: int
    worker_cpu_ms: float
    megabytes: float

    def __str__(self) -> str:
        said = (
            f"{self.tokens_per_second:.0f} tokens/s, input wait {self.input_wait_ms / self.wall_ms:.1%}; "
            f"ms a step: {self.wall_ms:.1f}, device {self.device_ms:.1f} and waiting {self.device_wait_ms:.1f}, "
            f"host waiting {self.input_wait_ms:.1f}, its CPU {self.host_cpu_ms:.1f} (process "
            f"{self.process_cpu_ms:.1f}, pushed aside {self.pushed_aside:.1f} times)"
        )
        if not self.workers:
            return said
        rate = self.megabytes / max(self.worker_cpu_ms, 1e-9) * 1e3
        busy = self.worker_cpu_ms / self.wall_ms / self.workers
        return (
            f"{said}; {self.workers} processes, {self.worker_cpu_ms:.0f} ms of CPU a step: {busy:.0%} busy, "
            f"{rate:.0f} MB/s each by CPU time"
        )


def _timed(trainer: Trainer, batches: Iterable[StepBatch], left_out: int, steps: int, size: Size) -> Timing:
    """The steps [left_out, steps) of the loop."""
    meter = Meter()
    trainer.step = 1
    source = iter(batches)
    marks: list[tuple[Any, Any]] = []
    num_tokens, bytes_per_token = 0, 2 * len(size.layer_ids) * size.hidden_size
    began = _Used.now()
    for number in range(steps):
        if number == left_out:
            synchronize()
            marks.clear()
            meter.take()
            num_tokens = 0
            began = _Used.now()
        with meter.waiting():
            batch = next(source)
        trainer._train_step(replace(batch, packs=_Marked(batch.packs, marks)), meter)
        meter.count(batch.num_tokens)
        num_tokens += batch.num_tokens
    end = _mark()
    synchronize()
    rate, _, waited = meter.take()
    used, count = _Used.now(), steps - left_out
    after = [mark[0] for mark in marks[1:]] + [end]
    return Timing(
        tokens_per_second=rate,
        wall_ms=(used.wall - began.wall) / count * 1e3,
        input_wait_ms=waited / count * 1e3,
        host_cpu_ms=(used.thread - began.thread) / count * 1e3,
        process_cpu_ms=(used.process - began.process) / count * 1e3,
        pushed_aside=(used.pushed_aside - began.pushed_aside) / count,
        device_wait_ms=sum(_ms_between(*mark) for mark in marks) / count,
        device_ms=sum(_ms_between(got, done) for (_, got), done in zip(marks, after, strict=True)) / count,
        workers=len(used.workers),
        worker_cpu_ms=sum(used.workers[pid] - began.workers.get(pid, 0.0) for pid in used.workers) / count * 1e3,
        megabytes=num_tokens * bytes_per_token / count / 1e6,
    )


@dataclass(frozen=True)
class _Used:
    """Seconds by each clock, and of each input process; involuntary context switches of this process."""

    wall: float
    thread: float
    process: float
    pushed_aside: int
    workers: dict[int, float]

    @classmethod
    def now(cls) -> _Used:
        workers = {}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if "spawn_main" in " ".join(child.cmdline()):
                    times = child.cpu_times()
                    workers[child.pid] = times.user + times.system
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), switches, workers)


class _Marked:
    """A step's packs. `marks` get two marks of each: before the device waits for it, and when it has it."""

    def __init__(self, packs: Any, marks: list[tuple[Any, Any]]) -> None:
        self._packs, self._marks = packs, marks

    def __len__(self) -> int:
        return len(self._packs)

    def __iter__(self) -> Iterator[PackedBatch]:
        source = iter(self._packs)
        for _ in range(len(self._packs)):
            asked = _mark()
            pack = next(source)
            self._marks.append((asked, _mark()))
            yield pack


def _mark() -> Any:
    """A point in what the device does."""
    if DEVICE.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(first: Any, second: Any) -> float:
    return (second - first) * 1e3 if DEVICE.type == "cpu" else first.elapsed_time(second)


class _Counted:
    """speculators' data loader, its batches' tokens and the time of each kept."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batch_sampler = loader, loader.batch_sampler
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.tokens.append(int((batch["document_ids"] != -1).sum()))
            yield batch


def peer_rate(workload: Workload) -> float:
    """(c): tokens/s of speculators' Trainer, from the same samples as its safetensors files."""
    from hs_connectors import FileTransfer
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import trainer as peer
    from speculators.train.dataloader import create_train_val_loaders

    size, config = workload.size, config_of(workload.size)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # what a process of its own would have
    _lengthen(workload)
    loader, _ = create_train_val_loaders(
        data_path=str(workload.peer_folder / "long"), total_seq_len=size.total_seq_len,
        hidden_states_dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32,
        transfer=FileTransfer(workload.peer_folder / "hidden_states"), vllm_endpoint="", on_missing="raise",
        verifier_name_or_path=workload.spec(config).verifier_path, request_timeout=None, max_retries=0,
        generation_validation_retries=0, max_consecutive_generation_failures=1, hidden_size=size.hidden_size,
        num_target_layers=len(size.layer_ids) - 1, num_workers=PEER_WORKERS if DEVICE.type == "cuda" else 1,
        prefetch_factor=PEER_PREFETCH, preprocess=shift_batch, train_data_ratio=0.98,
    )  # fmt: skip
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=config.ttt_steps,
        ttt_step_loss_decay=config.ttt_step_loss_decay,
    )  # fmt: skip
    counted, times = _Counted(loader), []
    if DEVICE.type == "cpu":
        # It knows no CPU; these two are enough to go through its code.
        peer.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_: None
    skip = min(PEER_LEFT_OUT_STEPS, len(loader) // 3)
    steps = min(len(loader), skip + min(PEER_STEPS, size.fed_steps))
    settings = peer_config(workload, workload.folder / "peer-out", train_call_kwargs=options, max_steps=steps)
    trainer = peer.Trainer(peer_model(workload), settings, counted, None)

    def stepped() -> None:
        if len(times) in (skip - 1, steps - 1):
            synchronize()
        times.append(time.perf_counter())

    trainer.train_epoch(0, step_callback=stepped)
    rate = sum(counted.tokens[skip:steps]) / (times[steps - 1] - times[skip - 1])
    print(f"speculators' Trainer: {rate:.0f} tokens/s over {steps - skip} steps; {PEER_WORKERS} processes")
    return rate


def _lengthen(workload: Workload) -> None:
    """The data set several times over, its files linked, so that one epoch outlasts what is prefetched."""
    from datasets import concatenate_datasets, load_from_disk

    data = load_from_disk(str(workload.peer_folder))
    data = concatenate_datasets([data] * PEER_COPIES)
    data.set_format("torch")
    data.save_to_disk(str(workload.peer_folder / "long"))
    files, count = workload.peer_folder / "hidden_states", workload.size.num_samples
    for number in range(count, PEER_COPIES * count):
        os.link(files / f"hs_{number % count}.safetensors", files / f"hs_{number}.safetensors")


@dataclass(frozen=True)
class RankFigures:
    """What a run over ranks came to."""

    tokens_per_second: float
    losses: list[float]


def torchrun(workload: Workload, ranks: int, kind: str, seconds: float, script: str) -> RankFigures:
    """(d): one run of the trainer's steps under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
    command += ["--rank-of", str(workload.folder), "--distribution", kind]
    if DEVICE.type == "cpu":
        command.append("--dry-run-cpu")
    log = workload.folder / f"{kind}-{ranks}.log"
    environment = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    process = GuardedProcess.start(
        command, token=process_token(str(workload.folder), kind), log_path=log, env=environment
    )
    try:
        process.wait(seconds)
    except TimeoutError:
        print(f"ended after {seconds:.0f} s")
    finally:
        process.stop(grace_seconds=0.5)
    out = log.read_text(errors="replace")
    lines = [line for line in map(parse, out.splitlines()) if line is not None]
    if not lines:
        raise RuntimeError(f"it said nothing of its steps: {out[-3000:]}")
    rates = [line["tokens_per_second"] for line in lines[1:]] or [lines[0]["tokens_per_second"]]
    figures = RankFigures(statistics.median(rates), [line["loss"] for line in lines])
    waits = sum(line["input_wait_seconds"] for line in lines[1:])
    print(f"{kind} on {ranks}: {figures.tokens_per_second:.0f} tokens/s, {waits:.2f} s waited for input")
    print("losses " + " ".join(f"{loss:.4f}" for loss in figures.losses), flush=True)
    return figures


def train_as_rank(workload: Workload, distribution: str) -> None:
    """What each rank of `torchrun` does: some steps of the loop, without a checkpoint."""
    size = workload.size
    config = config_of(
        size, global_batch=4, distribution=distribution, log_every_steps=max(2, size.timed_steps // 2)
    )
    ranks = Ranks()
    trainer = Trainer(workload.spec(config), ranks)
    if ranks.rank == 0:
        trainer.metrics = MetricsFile(workload.folder / "metrics.jsonl")
    meter = Meter()
    steps = 3 * size.timed_steps
    batches = trainer.feed.batches(0, steps)
    for step, batch in enumerate(batches, 1):
        trainer.step = step
        trainer._train_step(batch, meter)
        meter.count(batch.num_tokens)
        if step % config.log_every_steps == 0:
            trainer._log_training(meter)
    ranks.barrier()
    # As infra.training itself ends: threads that are left are not worth waiting for.
    os._exit(0)
