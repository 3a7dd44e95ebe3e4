"""An extraction engine that is cancelled while it loads ends at once, and its thread with it."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from functools import partial
from pathlib import Path

import pytest

from infra.errors import ServerError
from infra.extraction import ExtractConfig, ExtractionEngine
from infra.fingerprint import stage_content
from infra.manifest import StageRef
from infra.processes import living, process_token
from infra.vllm_config import VllmConfig
from tasks import extract
from tests.test_extraction import FAKE, VERIFIER, engine

NEVER_READY = "hang"


async def test_cancelled_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(extract, "ExtractionEngine", partial(ExtractionEngine, worker=FAKE))
    stage = StageRef(str(tmp_path), "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))
    token = process_token(stage.uri, "engine")
    vllm = VllmConfig(python=sys.executable, environment={"FAKE_FAULT": NEVER_READY}, startup_timeout_seconds=60.0)
    loading = asyncio.create_task(extract.start_engine.fn(stage, ExtractConfig(), vllm, VERIFIER, False))
    async with asyncio.timeout(20):
        while len(living(token)) < 2:  # noqa: ASYNC110 (the guard and the worker are no events of ours)
            await asyncio.sleep(0.05)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert living(token) == []
    # Joins the thread that was loading: the interpreter could not end before.
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 10)


def test_stopped_before_it_has_started(tmp_path: Path) -> None:
    token = process_token("test", str(os.getpid()), uuid.uuid4().hex)
    stopped = engine(token, tmp_path)
    stopped.stop()
    with pytest.raises(ServerError, match="stopped before it was started"):
        stopped.__enter__()
    assert living(token) == []
