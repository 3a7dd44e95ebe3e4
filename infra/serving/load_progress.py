"""How far a starting vLLM server has come, or why it will not, read from what it logs (vLLM 0.24 to 0.32)."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

NEWS_SECONDS = 10.0  # least time between two pieces of news, and how often the log is read
SAME_NEWS_SECONDS = 60.0  # after this long the same is said again, so that a person sees it is still watched
MAX_READ_BYTES = 262_144
MAX_SAID_CHARACTERS = 160

# Each line's own words, and ours. vLLM redraws its bars with a carriage return.
_MILESTONES = (
    (re.compile(r"[Ll]oading [^\r\n]*?:\s+(\d+)%[^\r\n]*?\|\s*(\d+)/(\d+) \["), "weights: {0} % ({1} of {2})"),
    (re.compile(r"Starting to load model"), "weights: loading begins"),
    (re.compile(r"Model loading took (\S+) GiB(?: memory)?"), "weights are loaded, {0} GiB on each GPU"),
    (re.compile(r"(?:Compiling a graph|Dynamo bytecode transform)"), "compiling the model"),
    (re.compile(r"torch\.compile (?:took|takes) (\S+) s in total"), "compiled in {0} s"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache of {0} tokens"),
    (re.compile(r"Capturing CUDA graphs?[^\r\n]*?:\s+(\d+)%"), "CUDA graphs: {0} %"),
    (re.compile(r"init engine [^\r\n]*? took (\S+) s"), "the engine is up ({0} s), the API comes"),
)
# `(APIServer pid=1) INFO 11-29 21:22:32 [model.py:733] Resolved architecture: …`
_INFORMATION = re.compile(r"\bINFO (?:[\d :-]*\[[^\]\r\n]*\] )?([^\r\n]+)")
# Pydantic's, over two lines or more, each perhaps behind the name of its process.
_REFUSAL = re.compile(
    r"validation errors? for \w+\s.*?(?:Value error|Assertion failed), (?P<why>.*?)\s*\[type=", re.DOTALL
)


def load_milestone(log_text: str) -> str | None:
    """The latest thing that vLLM says it has done or is doing, in a few words; None where it says nothing known."""
    latest: tuple[int, str] | None = None
    for pattern, words in _MILESTONES:
        for found in pattern.finditer(log_text):
            if latest is None or found.start() > latest[0]:
                latest = found.start(), words.format(*found.groups())
    return latest[1] if latest else None


def last_information(log_text: str) -> str:
    """The last thing that vLLM says for a reader, without its prefix: no warning of how it is built, no traceback.

    Empty where it says nothing of the kind.
    """
    found = _INFORMATION.findall(log_text)
    return str(found[-1])[:MAX_SAID_CHARACTERS] if found else ""


def refusal(log_text: str) -> str | None:
    """What its validation found wrong with the configuration, which no other try would change; None for nothing."""
    found = _REFUSAL.search(log_text)
    return None if found is None else " ".join(found["why"].split())


class LoadReport:
    """What is new about a start, at a bounded rate.

    Args:
        log_path: the server's log.
        log_offset: bytes of it that an earlier start has written.
    """

    def __init__(self, log_path: Path, log_offset: int) -> None:
        self._log_path = log_path
        self._log_offset = log_offset
        self._looked_at = self._said_at = time.monotonic()
        self._said: str | None = None

    def news(self) -> str | None:
        """The latest milestone (or log line, before the first), when it is due to be told; None otherwise."""
        now = time.monotonic()
        if now - self._looked_at < NEWS_SECONDS:
            return None
        self._looked_at = now
        text = self.log_text()
        said = load_milestone(text) or f"it says: {last_information(text) or 'nothing'}"
        if said == self._said and now - self._said_at < SAME_NEWS_SECONDS:
            return None
        self._said, self._said_at = said, now
        return said

    def log_text(self) -> str:
        """The end of what this start has logged."""
        with open(self._log_path, "rb") as log:
            log.seek(max(self._log_offset, log.seek(0, os.SEEK_END) - MAX_READ_BYTES))
            return log.read().decode(errors="replace")
