"""One tree of errors. Whether a retry can mend something follows from the type, never from the message.

DraftsmithError
├── InputError           what the user gave is wrong: one line, exit code 2, never retried
├── InfrastructureError  a process, node, server or store failed: retry with backoff
│   ├── ServerError      a vLLM server or engine did not start, died or hung
│   ├── StorageError     the object store did not answer in time
│   └── LeaseLost        another run has taken over this work: not retried in place
├── PartialError         part of the work is bad: redo that part
│   └── DamagedShard     a shard's bytes do not match its record
└── StageFailed          the stage ran and its result is not acceptable: a person must look
"""

from __future__ import annotations

from infra.redaction import redact


class DraftsmithError(Exception):
    """Root of every error this project raises on purpose. Its text holds no secret of this process."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(redact(one) if isinstance(one, str) else one for one in arguments))


class InputError(DraftsmithError):
    """A config field, prompt file or argument is wrong.

    Args:
        field: dotted name of the field, as the user wrote it (`generate.temperature`), or the file's name.
        problem: what is wrong and what would be right, in one line.
    """

    def __init__(self, field: str, problem: str) -> None:
        problem = redact(" ".join(problem.split()))  # quoted errors of libraries come in several lines
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return InputError, (self.field, self.problem)


class InfrastructureError(DraftsmithError):
    """Something outside the program failed; the same call may succeed later."""


class ServerError(InfrastructureError):
    """A vLLM server or engine did not start, died, or stopped making progress."""


class StorageError(InfrastructureError):
    """The object store did not answer, or throttled longer than the bounded retries."""


class LeaseLost(InfrastructureError):
    """Another run has taken over this work; going on here would only repeat it."""


class PartialError(DraftsmithError):
    """Part of the work is bad and must be redone; the rest stands."""


class DamagedShard(PartialError):
    """A shard's object is absent or its bytes do not match its record.

    Args:
        stage_uri: URI of the stage folder (`<root>/<stage>/<key>`) that owns the shard.
        shard: id of the shard, for example "00012".
        problem: what was found, in a few words.
    """

    def __init__(self, stage_uri: str, shard: str, problem: str) -> None:
        super().__init__(f"{stage_uri} shard {shard}: {problem}")
        self.stage_uri = stage_uri
        self.shard = shard
        self.problem = redact(problem)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return DamagedShard, (self.stage_uri, self.shard, self.problem)


class StageFailed(DraftsmithError):
    """A stage ran to its end and its result cannot be accepted (too many failed rows, a broken export)."""
