"""Builds shards of hidden states, one at a time: reads what an engine has staged, checks, encodes, writes a file.

Run by `infra.extraction.build_pool` in processes of their own, since threads of one process would queue for
Python's lock, and for the kernel's on its memory. They speak pickles over stdin and stdout:

    Setup                once, answered by Say.READY
    Order                begins a shard; ends with its BuiltShard, or with a Failure
    Say.NEXT             asks for the next sample's Staged; None is the end
    logging.LogRecord    for the parent's log, at any time
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infra.allocator import keep_freed_memory
from infra.extraction.rows import BuiltShard, ExtractResult, ExtractSample, build_shard, samples_of
from infra.extraction.staged_states import Staged, read_staged
from infra.hidden_states import HiddenStatesMeta
from infra.state_checks.checks import ChecksConfig, StateChecks
from infra.state_checks.norms import LayerNorms
from infra.state_checks.verifier_head import VerifierHead

# The engine comes first: on a GPU its process launches the work, without one it computes on the same cores.
NICENESS = 10


class Say(Enum):
    READY = "ready"
    NEXT = "next"


class Failure(NamedTuple):
    reason: str


class Setup(NamedTuple):
    """What all shards of a stage have in common.

    Args:
        head_folder: the verifier's, whose head is mapped and so shared by all processes; None without that check.
    """

    checks: ChecksConfig
    meta: HiddenStatesMeta
    head_folder: Path | None


class Order(NamedTuple):
    """One shard to build.

    Args:
        responses: table of `schemas.RESPONSES`.
        known: the norms that the stage knows.
        path: of the file to write.
    """

    responses: Any
    known: LayerNorms | None
    path: Path


def main() -> None:
    """Serve orders until stdin ends."""
    orders, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever else prints goes to the log

    def hear() -> Any:
        return pickle.loads(orders.recv_bytes())

    def say(message: Any) -> None:
        replies.send_bytes(pickle.dumps(message))

    def ask() -> Any:
        say(Say.NEXT)
        return hear()

    torch.set_num_threads(1)
    os.nice(NICENESS)
    keep_freed_memory()
    logging.getLogger("draftsmith").addHandler(_ToParent(say))
    setup: Setup = hear()
    head = None if setup.head_folder is None else VerifierHead.open(setup.head_folder)
    say(Say.READY)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            order = hear()
            try:
                say(_built(order, StateChecks(setup.checks, setup.meta, head), setup.meta, ask))
            except (EOFError, BrokenPipeError):
                raise  # the parent is gone
            except Exception as error:
                traceback.print_exc()
                say(Failure(f"{type(error).__name__}: {error}"))


def _built(order: Order, checks: StateChecks, meta: HiddenStatesMeta, ask: Callable[[], Any]) -> BuiltShard:
    if order.known:
        checks.norms.learn(order.known)
    results = _results(samples_of(order.responses), meta, ask)
    return build_shard(order.responses, results, meta, checks, order.path)


def _results(
    samples: Sequence[ExtractSample], meta: HiddenStatesMeta, ask: Callable[[], Any]
) -> Iterator[ExtractResult]:
    for sample in samples:
        staged: Staged = ask()
        yield read_staged(sample, staged, meta)
    ask()


class _ToParent(logging.handlers.QueueHandler):
    """Hands records on, their message made up."""

    def __init__(self, say: Callable[[Any], None]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._say = say

    def enqueue(self, record: logging.LogRecord) -> None:
        self._say(record)
