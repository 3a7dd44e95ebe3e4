"""How fast a draft trains on one H200 and on two, against speculators' own step and its own trainer.

    python benchmarks/training_h200.py [--gpus 2 | --fed-only | --more] [--seconds 420] [--folder DIR]
                                       [--dry-run-cpu]

Hidden size 4,096, four layers, draft vocabulary 32,000, packed length 8,192, three TTT steps, one decoder layer of
Llama-8B's shape (294M trained weights), bf16, AdamW. Everything is random and made here. Tables are printed as they
come, the line of ratios last:

- `ratio_step`: our step's tokens/s over that of speculators' own compiled step (eager loss) on one batch, every
  token trained. With prompts of 22 %, as the samples have them, it is `ratio_step_prompts`.
- `ratio_fed_*`: steps fed from Parquet shards on local disk (written just before, so in the page cache), over the
  loop's steps on 24 batches resident on the GPU. The steady state: the first 45 steps are left out, in which the
  processes start, the ring fills and every shard is hashed once; the processes are at work until the last step
  that is timed. Each line says what a step's time was spent on, and how busy the processes were. `--fed-only` does
  these parts alone; last it feeds bf16 once more with as many threads in the trainer's process as there are cores.
- `ratio_vs_trainer`: fed from bf16 shards, over speculators' Trainer on the same samples as its safetensors files.

With `--gpus 2`: DDP and FSDP2 under torchrun, the global batch of four packs the same for each; last line
`scaling_ddp=… scaling_fsdp2=… loss_gap_ddp=… loss_gap_fsdp2=…`, each against one GPU. A part that fails or is out
of time prints why and leaves its figure out as `nan`. `--dry-run-cpu` goes through all of it at a tiny size.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import training_parts as parts
from benchmarks import training_steps as steps
from benchmarks.training_workload import FULL, TINY, Size, Workload, write_samples, write_verifier
from infra.hidden_states import ENCODINGS


class Report:
    """Parts in turn, each guarded: one that fails costs its own figures only.

    Args:
        seconds: for all parts together.
    """

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.seconds = seconds
        self.ratios: dict[str, float] = {}
        self.fed: dict[str, float | None] = {}  # tokens/s by encoding

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def part(self, title: str, needed_seconds: float, work: Callable[[], Any]) -> Any:
        """Do one part where the time that is left allows it; returns what it returns, or None."""
        at = time.monotonic() - self.began
        if self.left() < needed_seconds:
            print(f"\n## {title}: left out, {self.left():.0f} s are left", flush=True)
            return None
        print(f"\n## {title} (at {at:.0f} s)", flush=True)
        try:
            return work()
        except Exception as error:
            print(f"failed: {type(error).__name__}: {str(error)[:600]}")
            traceback.print_exc(limit=-6, file=sys.stdout)
            return None
        finally:
            print(f"({time.monotonic() - self.began - at:.0f} s)", flush=True)
            steps.free()

    def ratio(self, name: str, value: float | None, base: float | None) -> None:
        self.ratios[name] = value / base if value and base else math.nan

    def last_line(self) -> None:
        print(" ".join(f"{name}={value:.4g}" for name, value in self.ratios.items()), flush=True)


def one_gpu(workload: Workload, report: Report) -> None:
    """Parts (a) to (c)."""
    for name in ("ratio_step", "ratio_fed_bf16", "ratio_fed_bf16_split", "ratio_fed_fp8", "ratio_vs_trainer"):
        report.ratios[name] = math.nan
    report.part("verifier", 0, lambda: write_verifier(workload))
    # The samples are written while the models are built and compiled; nothing is timed meanwhile.
    with ThreadPoolExecutor(1) as beside:
        samples = beside.submit(write_samples, workload, peer=True)
        rates: dict[str, float] = {}
        report.part("(a) one step", 90, lambda: steps.compare_steps(workload, steps.MAIN_STEPS, rates, samples))
        report.ratio("ratio_step", rates.get("ours"), rates.get("theirs"))
        report.part("samples", 0, lambda: print(f"all written: {samples.result() is None}"))
    fed_parts(workload, report)
    peer = report.part("(c) speculators' Trainer", 45, lambda: parts.peer_rate(workload))
    report.ratio("ratio_vs_trainer", report.fed.get("bf16"), peer)
    ours, theirs = rates.get("ours_prompts"), rates.get("theirs_prompts")
    print(f"\nratio_step_prompts={ours / theirs if ours and theirs else math.nan:.4g}")


def fed_parts(workload: Workload, report: Report) -> float | None:
    """Part (b): on resident data (which is returned), and from each encoding."""
    resident = report.part("(b) resident", 30, lambda: parts.resident_rate(workload))
    for encoding in workload.encodings:
        found = report.part(f"(b) fed from {encoding}", 22, lambda e=encoding: parts.fed_rate(workload, e))
        report.fed[encoding] = found
        report.ratio(f"ratio_fed_{encoding.removesuffix('_e4m3')}", found, resident)
    return resident


def fed_only(workload: Workload, report: Report) -> None:
    """Part (b) alone, and what the number of host threads does."""
    report.part("verifier and samples", 0, lambda: (write_verifier(workload), write_samples(workload, peer=False)))
    resident = fed_parts(workload, report)
    cores = len(os.sched_getaffinity(0))
    found = report.part("many threads", 25, lambda: parts.fed_rate(workload, "bf16", cores))
    report.ratio("ratio_fed_bf16_many_threads", found, resident)


def more_steps(workload: Workload, report: Report) -> None:
    """Other ways to do a step, and where the time of ours goes."""
    report.part("verifier", 0, lambda: write_verifier(workload))
    rates: dict[str, float] = {}
    report.part("steps", 60, lambda: steps.compare_steps(workload, steps.MORE_STEPS, rates))
    report.ratios.update(rates)
    report.part("where our step's time goes", 30, lambda: steps.profile_step(workload))


def spread(size: Size) -> Size:
    """What several GPUs train on: less of it, and one shape of rows to compile."""
    return replace(
        size, num_shards=size.num_shards // 2, prompt_share=0.0, timed_steps=max(2, size.timed_steps // 2)
    )


def several_gpus(workload: Workload, report: Report, gpus: int) -> None:
    """Part (d)."""
    names = ("scaling_ddp", "scaling_fsdp2", "loss_gap_ddp", "loss_gap_fsdp2")
    report.ratios.update(dict.fromkeys(names, math.nan))
    report.part("verifier and samples", 0, lambda: (write_verifier(workload), write_samples(workload, peer=False)))
    found: dict[str, Any] = {}
    for name, ranks, kind in (("ddp", gpus, "ddp"), ("one", 1, "ddp"), ("fsdp2", gpus, "fsdp2")):
        title = f"{kind} on {ranks}"
        found[name] = report.part(
            title, 30, lambda r=ranks, k=kind: parts.torchrun(workload, r, k, min(170.0, report.left()), __file__)
        )
    one = found["one"]
    for name in ("ddp", "fsdp2"):
        if found[name] and one:
            report.ratio(f"scaling_{name}", found[name].tokens_per_second, one.tokens_per_second)
            gaps = [abs(a - b) / b for a, b in zip(found[name].losses, one.losses, strict=False)]
            report.ratios[f"loss_gap_{name}"] = max(gaps, default=math.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=420.0, help="for all parts together")
    parser.add_argument("--folder", help="where the scratch folder is made")
    parser.add_argument("--fed-only", action="store_true", help="part (b) alone")
    parser.add_argument("--more", action="store_true", help="time other ways to do a step instead")
    parser.add_argument("--dry-run-cpu", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--distribution", default="ddp", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = TINY if arguments.dry_run_cpu else FULL
    if arguments.rank_of:
        parts.train_as_rank(Workload(spread(size), Path(arguments.rank_of), ("bf16",)), arguments.distribution)
        return
    if not arguments.dry_run_cpu and torch.cuda.device_count() < arguments.gpus:
        sys.exit(f"{arguments.gpus} GPUs are asked for, {torch.cuda.device_count()} are here")
    steps.print_versions()
    report = Report(arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="draftsmith-benchmark-", dir=arguments.folder) as folder:
        try:
            if arguments.more:
                more_steps(Workload(size, Path(folder), ()), report)
            elif arguments.fed_only:
                fed_only(Workload(size, Path(folder), tuple(ENCODINGS)), report)
            elif arguments.gpus == 1:
                one_gpu(Workload(size, Path(folder), tuple(ENCODINGS)), report)
            else:
                several_gpus(Workload(spread(size), Path(folder), ("bf16",)), report, arguments.gpus)
        finally:
            print()
            report.last_line()


if __name__ == "__main__":
    main()
