"""vLLM's hidden-state connector, made right on CPU and safe to read from another process.

Loaded by vLLM itself (`kv_connector_module_path`), inside vLLM's environment and processes, so it imports nothing
of this project. It changes three things of vLLM's `ExampleHiddenStatesConnector`:

- On CPU the parent uses CUDA streams and events and leaves an empty file. Here the states are gathered at once and
  the copy is handed to the parent's writer threads. On CUDA the parent's copy is used as it is.
- The parent reports a sample before its file is written. Here a file appears under its name only when it is whole
  (written beside, then renamed), and a failed write leaves `<name>.error` with the reason, so a reader without
  vLLM's lock files can neither read a torn file nor wait for one that will never come.
- vLLM 0.24 takes the block size of the whole cache for that of the states. Where a verifier has layers of several
  kinds it is another, and the states read were not the states written (vllm#46301). Here the cache itself tells.

Quantized verifiers and tensor parallelism need nothing here. vLLM keeps the states in a cache layer of the model's
own dtype, whatever weights and key-value cache are quantized to, and every rank holds them whole: rank 0 writes.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

ERROR_SUFFIX = ".error"
# What is built on of the parent, none of it public. A version that does it otherwise would go on without us, and
# write torn files or wrong states.
_PARENTS_PARAMETERS = {
    "register_kv_caches": ["self", "kv_caches"],
    "_submit_async_write": ["self", "pending"],
    "_write_tensors": ["tensors", "event", "filename", "lock_fd"],
    "_on_write_done": ["self", "req_id", "future"],
}
_PENDING_FIELDS = {"req_id", "filename", "token_ids", "block_ids"}


def _refuse_other_parents() -> None:
    """Raises ImportError, which ends the engine as it starts, where vLLM's connector is not the one known here."""
    for name, expected in _PARENTS_PARAMETERS.items():
        method = getattr(ExampleHiddenStatesConnector, name, None)
        found = list(inspect.signature(method).parameters) if method else None
        if found != expected:
            raise ImportError(f"This vLLM's hidden-state connector does not fit: its {name} takes {found}.")
    if missing := _PENDING_FIELDS - {field.name for field in dataclasses.fields(PendingSave)}:
        raise ImportError(f"This vLLM's hidden-state connector does not fit: its PendingSave lacks {missing}.")


_refuse_other_parents()


class _CopiedAlready:
    """Stands for the CUDA event of a copy that is complete: on CPU the gather itself is the copy."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class DraftsmithHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens] of each finished request."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        # [blocks, block_size, layers, hidden] in vLLM 0.24, [blocks, layers, block_size, hidden] in 0.32.
        _, one, other, _ = self._kv_cache.shape
        self._block_size = one * other // self.num_hidden_states

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy one finished request's states out of the cache and queue the write of its file.

        Effects: on return the request's cache blocks may be freed and overwritten.
        """
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None  # vLLM registers the cache before it runs anything
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        # Submitted under the parent's own bookkeeping, so its polling and clean-up hold on CPU too.
        tensors = {
            "hidden_states": self._gather(pending),
            "token_ids": pending.token_ids.clone(),
        }
        done = _CopiedAlready()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock_fd)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _gather(self, pending: PendingSave) -> torch.Tensor:
        """A copy of the request's states, [tokens, layers, hidden], out of its cache blocks."""
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        position = torch.arange(pending.token_ids.shape[0])
        slots = blocks[position // self._block_size] * self._block_size + position % self._block_size
        return extract_from_kv_cache(self._kv_cache, slots, len(slots)).contiguous()

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """Writer thread: wait for the copy, write the file whole or not at all, release the lock if there is one.

        Effects: leaves `filename`, or `filename` + ".error" with the reason in one line.
        """
        partial_name = filename + ".partial"
        try:
            event.synchronize()
            save_file(tensors, partial_name)
            os.replace(partial_name, filename)
        except BaseException as error:
            with open(filename + ERROR_SUFFIX, "w", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}".replace("\n", " "))
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)
