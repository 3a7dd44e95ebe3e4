"""Errors that say all themselves, shown in one line: no traceback of ours helps whoever has to correct a config."""

from __future__ import annotations

import logging

from infra.errors import InputError, StageFailed
from infra.redaction import redact_logs

_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


# Prefect's word of every task and flow that an interrupt ends.
_INTERRUPTED = "Execution was cancelled by the runtime environment."


class _Plainly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if _INTERRUPTED in record.getMessage():
            record.levelno, record.levelname = logging.INFO, "INFO"
        if record.exc_info and isinstance(record.exc_info[1], InputError | StageFailed):
            record.exc_info = record.exc_text = None
        return True


_FILTER = _Plainly()


def show_plain_errors() -> None:
    """Have Prefect log InputError and StageFailed without their tracebacks, an interrupt as no error, and nothing
    with a secret of this process. May be called again."""
    redact_logs()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)
