"""What surrounds a training step: feeding it, speculators' trainer, and several ranks."""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_steps import DEVICE, config_of, peer_config, peer_model, synchronize
from benchmarks.training_workload import Workload
from infra.processes import GuardedProcess, process_token
from infra.training.batch import PackedBatch
from infra.training.data import Schedule, ShardStore, StepBatch, StepLoader, build_index
from infra.training.feed import feed, input_workers
from infra.training.loop import Trainer
from infra.training.progress import Meter, MetricsFile, parse
from infra.training.ranks import Ranks

LEFT_OUT_STEPS = 20  # at the start of what is fed: processes start, buffers fill
PEER_LEFT_OUT_STEPS = 40
PEER_COPIES = 5  # hard links to each file, so that one epoch is long enough
PEER_WORKERS, PEER_PREFETCH = 12, 2


@functools.cache
def our_trainer(workload: Workload) -> Trainer:
    return Trainer(workload.spec(config_of(workload.size)), Ranks())


def resident_rate(workload: Workload) -> float:
    """(b): tokens/s of the loop's steps on batches that are on the device already."""
    trainer = our_trainer(workload)
    batches = []
    for step in range(4):
        batch = trainer.loader.load(step)
        batches.append(replace(batch, packs=[_states_on_device(pack) for pack in batch.packs]))
    steps = LEFT_OUT_STEPS // 4 + workload.size.fed_steps
    rate, _ = _rate(trainer, (batches[step % 4] for step in range(steps)), LEFT_OUT_STEPS // 4)
    print(f"resident: {rate:.0f} tokens/s")
    return rate


def _states_on_device(pack: PackedBatch) -> PackedBatch:
    return replace(
        pack,
        hidden_states=pack.hidden_states.to(DEVICE),
        verifier_last_hidden_states=pack.verifier_last_hidden_states.to(DEVICE),
    )


def fed_rate(workload: Workload, encoding: str) -> float:
    """(b): tokens/s of the loop's steps on batches from this encoding's shards."""
    trainer = our_trainer(workload)
    config = trainer.config
    store = ShardStore(workload.spec(config, encoding).hidden_states_uri, config.shuffle_window_shards)
    schedule = Schedule(build_index(store, config), config)
    loader = StepLoader(store, schedule, config, 0, 1)
    steps = LEFT_OUT_STEPS + workload.size.fed_steps
    workers = input_workers(config, DEVICE) or 2
    rate, waited = _rate(trainer, feed(loader, 0, steps, DEVICE, workers), LEFT_OUT_STEPS)
    folder = Path(workload.folder, encoding)
    gigabytes = sum(file.stat().st_size for file in folder.rglob("*.parquet")) / 1e9
    print(
        f"{encoding}: {rate:.0f} tokens/s, {waited:.2f} s waited for input; {workers} processes, {gigabytes:.1f} GB"
    )
    return rate


def _rate(trainer: Trainer, batches: Iterable[StepBatch], left_out: int) -> tuple[float, float]:
    """Tokens/s, and seconds that input was waited for, from step `left_out` on."""
    meter = Meter()
    trainer.step = 1
    source = iter(batches)
    number = 0
    while True:
        if number == left_out:
            synchronize()
            meter.take()
        with meter.waiting():
            batch = next(source, None)
        if batch is None:
            synchronize()
            return meter.take()
        trainer._train_step(batch, meter)
        meter.count(batch.num_tokens)
        number += 1


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
    steps = min(len(loader), skip + size.fed_steps)
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
    batches = feed(trainer.loader, 0, steps, ranks.device, input_workers(config, ranks.device))
    for step, batch in enumerate(batches, 1):
        trainer.step = step
        trainer._train_step(batch, meter)
        meter.count(batch.num_tokens)
        if step % config.log_every_steps == 0:
            trainer._log_training(meter)
    ranks.barrier()
    # As infra.training itself ends: threads that are left are not worth waiting for.
    os._exit(0)
