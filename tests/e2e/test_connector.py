"""The connector inside vLLM's environment: what it gathers, and the parents that it refuses."""

from __future__ import annotations

import subprocess

import pytest

from infra.locations import project_home
from infra.vllm_config import VllmConfig

pytestmark = pytest.mark.e2e

PARENT = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"

# Block 3 holds tokens 0 to 3 and block 1 the next ones, each value telling its block, token, layer and place.
GATHER = f"""
import torch
from infra.vllm_connector import DraftsmithHiddenStatesConnector
from {PARENT} import PendingSave
connector = object.__new__(DraftsmithHiddenStatesConnector)
by_token = torch.arange(5 * 4 * 3 * 2).reshape(5, 4, 3, 2)  # [blocks, block_size, layers, hidden]
connector._block_size, connector._kv_cache = 4, by_token.transpose(1, 2)
found = connector._gather(PendingSave("request", "file", torch.arange(6), [3, 1]))
assert torch.equal(found, torch.cat([by_token[3], by_token[1]])[:6]), found
"""
OTHER_PARENT = f"""
import {PARENT} as parent
parent.ExampleHiddenStatesConnector._write_tensors = staticmethod(lambda tensors, filename: None)
import infra.vllm_connector
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [VllmConfig().interpreter(), "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=project_home())


def test_states_are_gathered_from_the_blocks_of_the_request_in_order() -> None:
    done = run(GATHER)
    assert done.returncode == 0, done.stderr


def test_a_parent_that_is_built_otherwise_is_refused_in_one_line() -> None:
    done = run(OTHER_PARENT)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "ImportError: This vLLM's hidden-state connector does not fit: "
        "its _write_tensors takes ['tensors', 'filename']."
    )
