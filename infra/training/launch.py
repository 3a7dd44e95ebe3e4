"""The torchrun command that trains, and whether its ranks can share the work."""

from __future__ import annotations

import sys
import uuid

from infra.errors import InputError
from infra.training.config import TrainConfig


def check_ranks(config: TrainConfig) -> None:
    """Raise InputError where the ranks that the config asks for cannot train together."""
    check_batch(config, config.num_ranks * config.num_nodes)
    if config.num_nodes > 1:
        _rendezvous(config)


def check_batch(config: TrainConfig, num_ranks: int) -> None:
    """Raise InputError where a step's packed sequences cannot be shared out evenly among all ranks."""
    if over := config.global_batch % num_ranks:
        raise InputError(
            "train.global_batch",
            f"{config.global_batch} is not a multiple of the {num_ranks} ranks; "
            f"{config.global_batch - over + num_ranks} is one",
        )


def _rendezvous(config: TrainConfig) -> tuple[str, str]:
    host, _, port = config.rendezvous_endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(
            "train.rendezvous_endpoint",
            f"{config.num_nodes} nodes need one, as host:port; it is {config.rendezvous_endpoint!r}",
        )
    return host, port


def torchrun_command(config: TrainConfig, spec: str, node_rank: int = 0) -> list[str]:
    """What starts the ranks of one node.

    Args:
        spec: path or URI of a TrainSpec, readable on that node; a path, where one node trains, in a folder that is
            ours alone.
        node_rank: which of the nodes; rank 0, which tells how it goes, is on node 0.

    Raises:
        InputError: as `check_ranks`.
    """
    check_ranks(config)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={config.num_ranks}"]
    if config.num_nodes == 1:
        # As --standalone, but the ranks meet over a file: torch unpickles what its agents say there, and its TCP
        # store listens on every interface.
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={spec}.rendezvous", "--rdzv-conf=store_type=file"]
        command += [f"--rdzv-id={uuid.uuid4().hex}", "--local-addr=127.0.0.1"]
    else:
        host, port = _rendezvous(config)
        command += [f"--nnodes={config.num_nodes}", f"--node-rank={node_rank}"]
        command += [f"--master-addr={host}", f"--master-port={port}"]
    return [*command, f"--max-restarts={config.max_restarts}", "-m", "infra.training", spec]
