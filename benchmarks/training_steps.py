"""One training step, ours and speculators', on a pack that is on the device already."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.training_workload import Size, Workload
from infra import storage
from infra.drafts.vocab import VocabMap
from infra.training import packed
from infra.training.algorithm import trainable_parameters
from infra.training.batch import PackedBatch
from infra.training.config import TrainConfig
from infra.training.eagle3 import Eagle3
from infra.training.eagle3_model import build_model
from infra.training.optimizer import DraftOptimizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 3


def config_of(size: Size, **changes: Any) -> TrainConfig:
    """The trainer's config of all parts."""
    return TrainConfig(
        **{
            "num_steps": 10_000,
            "schedule": "constant",
            "warmup_steps": 0,
            "learning_rate": 1e-4,
            "total_seq_len": size.total_seq_len,
            "precision": "bf16" if DEVICE.type == "cuda" else "fp32",
            "validation_share": 0.0,
            "shuffle_window_shards": 8,
            "log_every_steps": 10,
            "implementation": "packed",
            **changes,
        }
    )


def print_versions() -> None:
    import transformers

    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    cores = len(os.sched_getaffinity(0))
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print(f"{time.strftime('%Y-%m-%d')}: {device}, {cores} cores, {versions}, speculators {version('speculators')}")


def free() -> None:
    """Give the device back what nobody refers to."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def full_pack(size: Size, prompt_share: float) -> PackedBatch:
    """A pack of exactly total_seq_len tokens as `feed` hands it over: states on the device, the rest on the CPU."""
    draw = torch.Generator().manual_seed(5)
    lengths: list[int] = []
    while (room := size.total_seq_len - sum(lengths)) > 0:
        length = int(torch.randint(size.min_tokens, size.max_tokens + 1, (1,), generator=draw))
        lengths.append(min(room, length))
    mask = torch.cat([torch.arange(length) >= int(length * prompt_share) for length in lengths])
    torch.manual_seed(6)
    layers = len(size.layer_ids) - 1
    dtype = torch.bfloat16
    return PackedBatch(
        torch.randn(size.total_seq_len, layers * size.hidden_size, device=DEVICE, dtype=dtype),
        torch.randint(0, size.verifier_vocab_size, (size.total_seq_len,)),
        mask,
        torch.cat([torch.arange(1, length + 1) for length in lengths]),
        torch.randn(size.total_seq_len, size.hidden_size, device=DEVICE, dtype=dtype),
        tuple(lengths),
    )


class OurStep:
    """What the loop does in one step on one pack."""

    def __init__(self, workload: Workload, **changes: Any) -> None:
        self.config = config_of(workload.size, **changes)
        spec = workload.spec(self.config)
        cuda = DEVICE.type == "cuda"
        self.objective = Eagle3().objective(spec, storage.get(spec.vocab_uri), cuda=cuda).to(DEVICE)
        self.parameters = trainable_parameters(self.objective.model)
        self.optimizer = DraftOptimizer(self.config, self.parameters)

    def __call__(self, pack: PackedBatch) -> Tensor:
        self.objective.expect([(pack.num_loss_tokens, len(pack.lengths))])
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16"):
            loss, _ = self.objective(self.objective.prepare(pack).to(DEVICE), pack.num_loss_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_gradient_norm)
        self.optimizer.step(self.config.learning_rate)
        found: Tensor = loss.detach()
        return found


class TheirStep:
    """What speculators' Trainer does in one step (train/trainer.py, train_epoch), without its logging."""

    def __init__(self, workload: Workload, loss: str = "eager") -> None:
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.train.optimizers import build_optimizers

        self.config = config_of(workload.size)
        self.model = peer_model(workload).to(DEVICE)
        self.optimizers = build_optimizers(self.model, peer_config(workload, Path("/nowhere")))
        self.options, _ = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation=loss, ttt_steps=self.config.ttt_steps,
            ttt_step_loss_decay=self.config.ttt_step_loss_decay,
        )  # fmt: skip
        self._batch: tuple[PackedBatch, dict[str, Tensor]] | None = None

    def __call__(self, pack: PackedBatch) -> Tensor:
        if self._batch is None or self._batch[0] is not pack:
            self._batch = pack, peer_batch(pack)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16"):
            _, loss, _ = self.model(**self._batch[1], **self.options)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        found: Tensor = loss.detach()
        return found


def peer_model(workload: Workload) -> Any:
    config = config_of(workload.size)
    spec = workload.spec(config)
    attention = "simple_flex_attention" if DEVICE.type == "cuda" else "eager"
    vocab = VocabMap.from_bytes(storage.get(spec.vocab_uri))
    return build_model(config, vocab, spec.verifier_path, spec.aux_hidden_state_layer_ids, attention=attention)


def peer_config(workload: Workload, folder: Path, **changes: Any) -> Any:
    from speculators.train.trainer import TrainerConfig

    return TrainerConfig(
        lr=1e-4, num_epochs=1, save_path=str(folder), scheduler_type="none", log_freq=10,
        hidden_states_dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32, **changes,
    )  # fmt: skip


def peer_batch(pack: PackedBatch) -> dict[str, Tensor]:
    """The pack as speculators' data loader collates it."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    named = {
        "hidden_states": pack.hidden_states.to(dtype),
        "input_ids": pack.input_ids,
        "document_ids": pack.document_ids,
        "loss_mask": pack.loss_mask,
        "position_ids": pack.position_ids,
        "verifier_last_hidden_states": pack.verifier_last_hidden_states.to(dtype),
    }
    return {name: value.to(DEVICE)[None] for name, value in named.items()}


Step = Callable[[PackedBatch], Tensor]


def _with_mixed_reductions(workload: Workload) -> Step:
    packed._compile.cache_clear()
    packed.MIXED_REDUCTIONS = True
    try:
        return OurStep(workload)
    finally:
        packed.MIXED_REDUCTIONS = False
        packed._compile.cache_clear()


MAIN_STEPS: dict[str, Callable[[Workload], Step]] = {"theirs": TheirStep, "ours": OurStep}
MORE_STEPS: dict[str, Callable[[Workload], Step]] = {
    "ours": OurStep,
    "theirs, fused loss": lambda workload: TheirStep(workload, "fused"),
    "ours, mixed reductions": _with_mixed_reductions,
    "ours, library": lambda workload: OurStep(workload, implementation="library"),
    "ours, checkpointed activations": lambda workload: OurStep(workload, activation_checkpointing=True),
    "ours, Muon": lambda workload: OurStep(workload, optimizer="muon"),
}


def compare_steps(
    workload: Workload,
    kinds: Mapping[str, Callable[[Workload], Step]],
    rates: dict[str, float],
    first: Future[None] | None = None,
) -> None:
    """(a): tokens/s of each way to do a step, on a pack of trained tokens only and, `<kind>_prompts`, with prompts.

    Args:
        rates: filled as they come.
        first: what must be done before anything is timed.
    """
    size = workload.size
    packs = {"": full_pack(size, 0.0), "_prompts": full_pack(size, size.prompt_share)}
    heads = f"{'ms':>8}{'tokens/s':>10}{'peak GB':>9}{'first loss':>12}{'last':>9}{'compile s':>11}"
    print(f"{'step':<32}{'pack':<10}{heads}")
    for kind, make in kinds.items():
        run = None
        try:
            run = make(workload)
            for suffix, pack in packs.items():
                if not suffix or kind in MAIN_STEPS:
                    rates[kind + suffix] = _time_step(kind, suffix, run, pack, size.timed_steps, first)
        except Exception as error:
            print(f"{kind:<32}failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc(limit=-4, file=sys.stdout)
        del run
        free()


def _time_step(
    kind: str, suffix: str, run: Step, pack: PackedBatch, num_steps: int, after: Future[None] | None
) -> float:
    began = time.perf_counter()
    first = float(run(pack))
    for _ in range(2):
        run(pack)
    synchronize()
    compiling = time.perf_counter() - began
    if after is not None:
        after.exception()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(num_steps):
            loss = run(pack)
        synchronize()
        seconds.append((time.perf_counter() - began) / num_steps)
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else 0.0
    usual = statistics.median(seconds)
    name = suffix.removeprefix("_") or "all"
    print(
        f"{kind:<32}{name:<10}{usual * 1e3:>8.1f}{pack.num_tokens / usual:>10.0f}{peak:>9.1f}"
        f"{first:>12.4f}{float(loss):>9.4f}{compiling:>11.1f}",
        flush=True,
    )
    return pack.num_tokens / usual


def profile_step(workload: Workload) -> None:
    """The kernels that take most of our step."""
    from torch.profiler import ProfilerActivity, profile

    run, pack = OurStep(workload), full_pack(workload.size, 0.0)
    for _ in range(3):
        run(pack)
    synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
    with profile(activities=activities) as found:
        for _ in range(2):
            run(pack)
        synchronize()
    rows = [row for row in found.key_averages() if row.self_device_time_total > 0]
    for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:24]:
        print(f"{row.self_device_time_total / 2e3:8.2f} ms {row.count // 2:5d}  {row.key[:100]}")
