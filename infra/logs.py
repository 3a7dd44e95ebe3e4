"""What the log of a child process says about its failure."""

from __future__ import annotations

import os
import re

from infra.redaction import redact

MAX_LINE_CHARACTERS = 400
_EXCEPTION_LINE = re.compile(r"\b[A-Za-z_]\w*(Error|Exception|Exit|Interrupt)(\s*:|$)|error: ")
_ERROR_LINE = re.compile(r"\b(ERROR|FATAL|CRITICAL|Error|Fatal|Killed|out of memory|[Cc]annot|refused|denied)\b")
_ANY_LINE = re.compile("")
_HARMLESS_LINE = re.compile(r"Warning:|\b(DEBUG|INFO|WARNING) ")
# As vLLM begins its lines: (EngineCore pid=1) ERROR 11-29 20:00:00 [core.py:1]
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((ERROR|CRITICAL|FATAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")


def is_error(line: str) -> bool:
    """Whether a line of a log looks like an error."""
    found = _EXCEPTION_LINE.search(line) or _ERROR_LINE.search(line)
    return bool(found) and not _HARMLESS_LINE.search(line)


def log_tail(
    path: str | os.PathLike[str], *, offset: int = 0, max_lines: int = 6, max_bytes: int = 262_144
) -> list[str]:
    """The last error-looking lines of a log file, oldest first, without secrets; none when it cannot be read.

    Prefers lines that name an exception, then lines of level ERROR or alike, then simply the last ones.

    Args:
        offset: bytes at the beginning to ignore (an earlier attempt's output; `GuardedProcess.log_offset`).
        max_lines: most lines to return; a repeated line counts once.
        max_bytes: most bytes to read from the end.
    """
    try:
        with open(path, "rb") as log:
            log.seek(max(offset, log.seek(0, os.SEEK_END) - max_bytes))
            text = redact(log.read().decode(errors="replace"))
    except OSError:
        return []
    lines = [line.rstrip()[:MAX_LINE_CHARACTERS] for line in re.split(r"[\r\n]+", text) if line.strip()]
    for pattern in (_EXCEPTION_LINE, _ERROR_LINE, _ANY_LINE):
        found = [i for i, line in enumerate(lines) if pattern.search(line) and not _HARMLESS_LINE.search(line)]
        if not found:
            continue
        # The last exception's message may go on in indented lines. One message often comes from several processes,
        # each with a prefix of its own.
        found += [i for i in range(found[-1] + 1, min(found[-1] + 3, len(lines))) if lines[i][0].isspace()]
        by_message = {_PREFIX.sub("", lines[i].strip()): lines[i].strip() for i in found}
        return list(by_message.values())[-max_lines:]
    return []
