"""A child process's log, for whoever cannot reach its node: some of it in the run's log, all of it in the store.

Only for runs of a deployment; `draftsmith run` has the file at hand, and a terminal that is to stay readable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

from prefect.artifacts import acreate_markdown_artifact

from infra import storage
from infra.locations import log_file
from infra.logs import is_error, log_tail
from infra.manifest import StageRef
from infra.redaction import redact, redact_bytes

logger = logging.getLogger("draftsmith.child")

# Prefect sets it in the process that a worker starts for a run.
RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
LOOK_SECONDS = 1.0
# Each line is a row in Prefect's database; raw vLLM output would cost the flow more than its own work.
LINES_PER_LOOK, ERRORS_PER_LOOK = 2, 20
MAX_CHARACTERS = 400


@contextlib.asynccontextmanager
async def child_log(stage: StageRef, name: str) -> AsyncIterator[None]:
    """Follow the log file of that name (`infra.locations.log_file`) for as long as the context lasts.

    Effects: error lines and a few of the others, each second, go to the run's log. When it ends, what was written
    meanwhile is put at `<root>/logs/<stage>-<key>/<name>-<run>.log`, and an artifact says so. None of it holds a
    secret of this process, and none can fail the work.
    """
    run = os.environ.get(RUN_VARIABLE)
    if run is None:
        yield
        return
    path = log_file(stage.stage, stage.key, name)
    follower = Follower(path, name)
    following = asyncio.create_task(_follow(follower))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        follower.look()
        uri = storage.join(stage.root, "logs", f"{stage.stage}-{stage.key}", f"{name}-{run[:8]}.log")
        await asyncio.shield(_publish(follower, uri))


class Follower:
    """What has been added to a log file, told at a bounded rate. The file need not exist yet."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.start = path.stat().st_size if path.exists() else 0
        self._read = self.start
        self._rest = b""

    def look(self) -> None:
        """Log what is new: error lines up to a bound, and the last ones of the others."""
        lines = self._new_lines()
        errors = [number for number, line in enumerate(lines) if is_error(line)]
        others = [number for number in range(len(lines)) if number not in set(errors)]
        told = sorted([*errors[-ERRORS_PER_LOOK:], *others[-LINES_PER_LOOK:]])
        for number in told:
            level = logging.WARNING if number in errors else logging.INFO
            logger.log(level, "%s: %s", self.name, lines[number][:MAX_CHARACTERS])
        if len(lines) > len(told):
            logger.debug("%s: %d more lines", self.name, len(lines) - len(told))

    def written(self) -> bytes:
        """All that was added, without secrets."""
        try:
            with self.path.open("rb") as log:
                log.seek(self.start)
                return redact_bytes(log.read())
        except OSError:
            return b""

    def _new_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as log:
                log.seek(self._read)
                added = log.read()
        except OSError:
            return []
        self._read += len(added)
        *whole, self._rest = (self._rest + added).split(b"\n")
        lines = redact(b"\n".join(whole).decode(errors="replace")).split("\n")
        return [text for line in lines if (text := line.strip())]


async def _follow(follower: Follower) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(follower.look)


async def _publish(follower: Follower, uri: str) -> None:
    try:
        body = await asyncio.to_thread(follower.written)
        await asyncio.to_thread(storage.put, uri, body)
        tail = "\n".join(log_tail(follower.path, offset=follower.start))
        text = f"Whole log, {len(body):,} bytes: `{uri}`\n\nErrors, or its end:\n\n```\n{tail}\n```\n"
        key = f"log-{follower.name}".lower().replace("_", "-")
        await acreate_markdown_artifact(text, key=key, description=f"Log of {follower.name}")
    except Exception as error:
        logger.warning("The log of %s could not be kept at %s: %r", follower.name, uri, error)
