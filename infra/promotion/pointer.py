"""The promoted speculator of a verifier: `speculators/<verifier>/promoted.json`, moved by compare-and-set.

The pointer names the export that is to be served, and holds the pointers before it. It is in no stage's key, and
the one object besides leases that changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infra import storage
from infra.errors import StageFailed, StorageError
from infra.promotion.gate import Decision, PromoteConfig, Row, decide
from infra.records import is_name

POINTER_FILE = "promoted.json"
FOLDER = "speculators"
MAX_ATTEMPTS = 20  # each is lost to another promotion only
FIGURES = (
    *("dataset", "temperature", "concurrency", "acceptance_length"),
    *("speedup", "speedup_low", "speedup_high"),
)


@dataclass(frozen=True)
class Promotion:
    """One speculator that was promoted, and what it was promoted for.

    Attributes:
        draft: key of its drafts stage; `export` and `evaluation` likewise are of this root.
        export: folder of the speculator, relative to the root.
        evaluation: key of the evaluation that it was promoted for.
        verifier_revision: what the verifier was then.
        num_speculative_tokens: tokens to draft per step.
        promoted_at: ISO 8601, UTC.
        run_id: `runs/<run_id>.json` says how it was made and served.
        reasons: what it had shown.
        figures: `FIGURES` of each data set, temperature and load.
    """

    draft: str
    export: str
    evaluation: str
    verifier_revision: str
    num_speculative_tokens: int
    promoted_at: str
    run_id: str
    reasons: tuple[str, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Pointer:
    """What a verifier's promoted.json says. `history` ends with the one that is promoted now; `body` are its bytes,
    None where there is none."""

    history: tuple[Promotion, ...] = ()
    body: bytes | None = field(default=None, repr=False)

    @property
    def promoted(self) -> Promotion | None:
        return self.history[-1] if self.history else None


@dataclass(frozen=True)
class Outcome:
    """What became of a draft.

    Attributes:
        promoted: it is the promoted one now; `moved`: because of this run.
    """

    promoted: bool
    moved: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        said = "Promoted" if self.moved else "Promoted before" if self.promoted else "Not promoted"
        return f"{said}: {'; '.join(self.reasons)}." if self.reasons else f"{said}."


def pointer_uri(root: str, verifier: str) -> str:
    return storage.join(root, FOLDER, verifier, POINTER_FILE)


def read_pointer(root: str, verifier: str) -> Pointer:
    """The promoted speculator of a verifier and those before it.

    Raises:
        StageFailed: promoted.json cannot be understood.
    """
    uri = pointer_uri(root, verifier)
    try:
        body = storage.get(uri)
    except FileNotFoundError:
        return Pointer()
    try:
        said = json.loads(body)
        entries = [*said["history"], said["promoted"]]
        return Pointer(tuple(_promotion(entry) for entry in entries), body)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StageFailed(f"{uri} cannot be understood ({problem}); mend it, or move it away") from error


def verifiers(root: str) -> list[str]:
    """Names of the verifiers that have a promoted speculator."""
    listed = storage.list_sizes(storage.join(root, FOLDER))
    return sorted(name.removesuffix(f"/{POINTER_FILE}") for name in listed if name.endswith(f"/{POINTER_FILE}"))


def rival(root: str, verifier: str, draft_key: str) -> str | None:
    """Key of the drafts stage that a draft is to be measured against: the promoted one, or, where that is the draft
    itself, the one promoted before it: so the run that promoted it finds its evaluation again. None: no such."""
    others = [entry.draft for entry in read_pointer(root, verifier).history if entry.draft != draft_key]
    return others[-1] if others else None


def promote(
    root: str,
    verifier: str,
    rows: Sequence[Row],
    draft: str,
    gate: PromoteConfig,
    entry: Callable[[Decision], Promotion],
) -> Outcome:
    """Promote a draft if it passes the gate, held against whatever is promoted at the moment of writing.

    Effects: writes `promoted.json` where it passes, else nothing. Of two that promote at a time, the second reads
    what the first has written and decides anew.

    Args:
        entry: makes the new pointer of what the gate has decided.

    Raises:
        StageFailed: promoted.json cannot be understood.
        StorageError: others kept writing it.
    """
    for _ in range(MAX_ATTEMPTS):
        pointer = read_pointer(root, verifier)
        now = pointer.promoted
        if now is not None and now.draft == draft:
            return Outcome(True, False, now.reasons)
        decision = decide(rows, draft, gate, now.draft if now else None)
        if not decision.passes:
            return Outcome(False, False, decision.reasons)
        history = [asdict(each) for each in pointer.history]
        said = {"verifier": verifier, "promoted": asdict(entry(decision)), "history": history}
        if storage.compare_and_set(pointer_uri(root, verifier), _dump(said), pointer.body):
            return Outcome(True, True, decision.reasons)
    raise StorageError(f"{pointer_uri(root, verifier)} was written by others {MAX_ATTEMPTS} times in a row")


def figures(rows: Sequence[Row]) -> tuple[dict[str, Any], ...]:
    """What a pointer keeps of the rows it was promoted for."""
    return tuple({name: row[name] for name in FIGURES} for row in rows)


def _promotion(entry: Mapping[str, Any]) -> Promotion:
    known = {name: entry[name] for name in Promotion.__dataclass_fields__}
    if not (is_name(known["draft"]) and is_name(known["evaluation"])):  # folders of these names are read, and made
        raise ValueError(f"{known['draft']!r} or {known['evaluation']!r} is no key")
    return Promotion(**{**known, "reasons": tuple(known["reasons"]), "figures": tuple(known["figures"])})


def _dump(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, indent=1, sort_keys=True).encode() + b"\n"
