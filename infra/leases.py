"""Leases: who works on a stage now, so that two copies do not make the same things at the same time.

A lease is one small JSON object, changed by compare-and-set only. Its holder renews it every `renew_seconds` from a
thread of its own. Somebody else takes it when it was released, when its owner was a process of this very machine
that is dead, or when it has not changed for `takeover_seconds` by the waiter's own monotonic clock: the clocks of
two machines are never compared. Each taking raises the epoch, so a holder that was only thought dead sees at its
next renewal that it has been replaced.

Correctness never rests on a lease: records are create-only, and of two writers of one shard the first one stands.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from infra import storage
from infra.errors import DraftsmithError
from infra.guard import process_start, runs_since

logger = logging.getLogger("draftsmith.leases")


@dataclass(frozen=True)
class Timing:
    """Seconds between renewals; seconds without one after which a lease may be taken; seconds between looks."""

    renew_seconds: float = 10.0
    takeover_seconds: float = 60.0
    poll_seconds: float = 2.0


DEFAULT_TIMING = Timing()


@dataclass(frozen=True)
class Owner:
    """One process of one boot of one machine. `started` is in clock ticks since that boot."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Owner:
        """This process; the fields that only Linux knows are empty elsewhere."""
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot_id = file.read().strip()
            # Two containers of one machine may share its name and its boot, and count their processes apart.
            namespace, started = os.readlink("/proc/self/ns/pid"), process_start(os.getpid())
        except OSError:
            boot_id, namespace, started = "", "", 0
        return cls(socket.gethostname(), boot_id, namespace, os.getpid(), started)

    def is_dead(self) -> bool:
        """Whether this machine knows that the process has ended; False where it cannot know."""
        here = Owner.here()
        ours = (self.host, self.boot_id, self.pid_namespace) == (here.host, here.boot_id, here.pid_namespace)
        return ours and here.boot_id != "" and not runs_since(self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Holding:
    """What the lease object says.

    Args:
        run: id of the Prefect flow run that holds it; empty outside of one.
        holder: made anew at each taking, so that two leases of one process are told apart.
        renewed: how often it was renewed; all that a renewal changes.
    """

    epoch: int
    owner: Owner
    run: str
    holder: str
    renewed: int = 0
    released: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, body: bytes | None) -> Holding | None:
        """None when there is no lease, or one that cannot be read."""
        try:
            found = json.loads(body or b"")
            return cls(**{**found, "epoch": int(found["epoch"]), "owner": Owner(**found["owner"])})
        except (ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return str(self.owner) + (f" (flow run {self.run})" if self.run else "")


class Lease:
    """A lease that is held and renewed until `release`. Ask a `Waiter` for one.

    `lost` turns true when somebody else has taken it; `taken_by` then says who.
    """

    def __init__(self, uri: str, holding: Holding, timing: Timing) -> None:
        self.uri = uri
        self.taken_by: Holding | None = None
        self._holding = holding
        self._body: bytes | None = holding.to_bytes()
        self._timing = timing
        self._renewed_at = time.monotonic()
        self._failing = False
        self._told = False
        self._on_lost: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease {uri}", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._holding.epoch

    @property
    def lost(self) -> bool:
        return self.taken_by is not None

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this once, from the renewing thread, when the lease is lost; at once if it is already."""
        self._on_lost = call
        if self.lost:
            self._tell()

    def renew(self) -> None:
        """Renew now, and see whether somebody else has taken the lease. A store that is away is waited out."""
        with self._lock:
            if self._stop.is_set() or self.lost:
                return
            try:
                self._renew()
            except (DraftsmithError, OSError) as error:
                self._say_failing(error)
        if self.lost:
            self._tell()

    def release(self) -> None:
        """Let the next one have it at once. Never fails: what is not released is taken after the usual time."""
        self._stop.set()
        # A renewal that hangs on a store that is away is not waited for: it may last minutes.
        if not self._lock.acquire(timeout=self._timing.renew_seconds):
            return
        try:
            # Changes nothing where somebody else has taken it.
            storage.compare_and_set(self.uri, replace(self._holding, released=True).to_bytes(), self._body)
        except (DraftsmithError, OSError) as error:
            logger.warning(
                "%s could not be released (%s); others wait for it for up to %g s.",
                self.uri,
                error,
                self._timing.takeover_seconds,
            )
        finally:
            self._lock.release()

    def _keep(self) -> None:
        while not self._stop.wait(self._timing.renew_seconds) and not self.lost:
            self.renew()

    def _renew(self) -> None:
        wanted = replace(self._holding, renewed=self._holding.renewed + 1)
        if storage.compare_and_set(self.uri, wanted.to_bytes(), self._body):
            if self._failing:
                logger.info("%s is renewed again after %.0f s.", self.uri, time.monotonic() - self._renewed_at)
            self._holding, self._body = wanted, wanted.to_bytes()
            self._renewed_at, self._failing = time.monotonic(), False
            return
        body = _read(self.uri)
        found = Holding.from_bytes(body)
        if found is None or found.holder == self._holding.holder:
            self._body = body  # removed or damaged from outside: the next renewal puts it back
            return
        self.taken_by = found
        logger.warning(
            "%s (epoch %d) was taken over by %s, epoch %d; the last renewal was %.0f s ago.",
            self.uri,
            self.epoch,
            found,
            found.epoch,
            time.monotonic() - self._renewed_at,
        )

    def _say_failing(self, error: Exception) -> None:
        silent = time.monotonic() - self._renewed_at
        if not self._failing:
            self._failing = True
            logger.warning("%s could not be renewed (%s); tried again, the work goes on.", self.uri, error)
        elif silent > self._timing.takeover_seconds:
            logger.warning(
                "%s has not been renewed for %.0f s: somebody else may have taken it. The next renewal will tell; "
                "records keep two copies from doing harm.",
                self.uri,
                silent,
            )

    def _tell(self) -> None:
        with self._lock:
            call, first = self._on_lost, not self._told
            self._told = self._told or call is not None
        if call is not None and first:
            call()


class Waiter:
    """Takes one lease as soon as that is right. Not thread-safe; call `try_take` every `timing.poll_seconds`.

    Args:
        root: the artifact root.
        name: what is leased (`lease_name`).
        run: id of the flow run that wants it.
        says_waiting: log for whom it waits; not where there is other work meanwhile.
    """

    def __init__(
        self,
        root: str,
        name: str,
        run: str = "",
        timing: Timing = DEFAULT_TIMING,
        clock: Callable[[], float] = time.monotonic,
        *,
        says_waiting: bool = True,
    ) -> None:
        self.uri = lease_uri(root, name)
        self.timing = timing
        self._says_waiting = says_waiting
        self._run = run
        self._clock = clock
        self._began = self._looked_at = self._unchanged_since = clock()
        self._seen: bytes | None = None
        self._told = ""

    def try_take(self) -> Lease | None:
        """The lease, or None while somebody else holds it.

        Raises:
            StorageError, InputError: the store could not be asked.
        """
        body = _read(self.uri)
        self._watch(body)
        found = Holding.from_bytes(body)
        why = self._why_free(found)
        if why is None:
            self._tell_waiting(found)
            return None
        epoch = found.epoch + 1 if found else 1
        wanted = Holding(epoch, Owner.here(), self._run, uuid.uuid4().hex)
        if not storage.compare_and_set(self.uri, wanted.to_bytes(), body):
            return None
        if why or self._told:
            waited = self._clock() - self._began
            logger.warning("%s is ours (epoch %d) after %.0f s: %s.", self.uri, epoch, waited, why or "released")
        return Lease(self.uri, wanted, self.timing)

    def _watch(self, body: bytes | None) -> None:
        now = self._clock()
        # While nobody could look (the store was away, this process was stopped) the holder may have been kept from
        # renewing too, so that time does not count.
        blind = now - self._looked_at > max(self.timing.takeover_seconds / 2, 2 * self.timing.poll_seconds)
        if body != self._seen or blind:
            self._seen, self._unchanged_since = body, now
        self._looked_at = now

    def _why_free(self, found: Holding | None) -> str | None:
        """Why the lease may be taken (empty when nobody else had it), or None while it may not."""
        if found is None or found.released:
            return ""
        if found.owner.is_dead():
            return f"{found} held it and is dead"
        unchanged = self._clock() - self._unchanged_since
        if unchanged >= self.timing.takeover_seconds:
            return f"{found} held it and has not renewed it for {unchanged:.0f} s"
        return None

    def _tell_waiting(self, found: Holding | None) -> None:
        if self._says_waiting and found is not None and found.holder != self._told:
            self._told = found.holder
            logger.info(
                "%s is held by %s. Waiting until it is released; taken over when not renewed for %g s.",
                self.uri,
                found,
                self.timing.takeover_seconds,
            )


def lease_name(stage: str, key: str) -> str:
    """Name of the lease of one stage under one key."""
    return f"{stage}-{key}"


def lease_uri(root: str, name: str) -> str:
    return storage.join(root, "leases", f"{name}.json")


def current(uri: str) -> Holding | None:
    """What the lease at `uri` says; None when nobody has taken it or it cannot be read."""
    return Holding.from_bytes(_read(uri))


def _read(uri: str) -> bytes | None:
    return storage.get_many([uri]).get(uri)
