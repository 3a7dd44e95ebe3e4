"""Which GPUs of a node each of several vLLM processes has: as they are named, or shared out in order.

Generation's replicas and extraction's engines use it alike, so each function is told the field that the user wrote.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from infra.errors import InputError
from infra.vllm_config import VllmConfig

GpuSets = list[list[int | str]]


def check_gpu_sets(sets: GpuSets | None, count: int, what: str) -> None:
    """Check sets that the user has named.

    Args:
        count: number of processes.
        what: what they are, in the plural.
    Raises:
        ValueError: there are more or fewer sets than processes, or a GPU stands in two of them.
    """
    if sets is None:
        return
    gpus = [str(gpu) for gpus in sets for gpu in gpus]
    if len(sets) != count:
        raise ValueError(f"gpu_sets has {len(sets)} sets for {count} {what}")
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"gpu_sets gives a GPU twice: {sets}")


def check_set_sizes(sets: GpuSets | None, gpus_each: int, field: str, sizes: str) -> None:
    """Check that each named set has the GPUs that its process needs.

    Args:
        sizes: the parallel sizes that follow from, in words.
    Raises:
        ValueError: a set has more or fewer.
    """
    for gpus in sets or []:
        if len(gpus) != gpus_each:
            raise ValueError(
                f"{field}: {gpus} has {len(gpus)} GPUs, but the parallel sizes of vllm ({sizes}) need {gpus_each}"
            )


def on_gpu_sets(
    vllm: VllmConfig, sets: Sequence[Sequence[int | str]] | None, count: int, gpus_each: int, field: str
) -> list[VllmConfig]:
    """The config of each of `count` processes, on its own GPUs; one alone has all that are visible.

    Args:
        sets: as named; None shares out the visible GPUs in order.
        gpus_each: GPUs that one process needs.
        field: of the count, such as `generate.servers.replicas`.
    Raises:
        InputError: fewer GPUs are visible than they need.
    """
    if sets is None:
        if count == 1:
            return [vllm]
        sets = _shared_out(vllm, count, gpus_each, field)
    return [vllm.on_gpus(gpus) for gpus in sets]


def _shared_out(vllm: VllmConfig, count: int, gpus_each: int, field: str) -> list[list[str]]:
    named = vllm.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    needed = count * gpus_each
    every = [str(gpu) for gpu in range(needed)]
    visible = every if named is None else [gpu for gpu in named.split(",") if gpu.strip()]
    if len(visible) < needed:
        raise InputError(
            field, f"{count} of {gpus_each} GPUs each need {needed}, but CUDA_VISIBLE_DEVICES is {named!r}"
        )
    return [visible[start : start + gpus_each] for start in range(0, needed, gpus_each)]
