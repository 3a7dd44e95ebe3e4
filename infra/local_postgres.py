"""PostgreSQL on this machine for one Prefect server: reached over a socket in a folder of its own, on no port.

Its files lie in /var/tmp and not in the cache: PostgreSQL refuses to run as root, so there it runs as the user
`postgres`, who cannot enter root's home; and the path of a socket may have 107 characters only.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

from infra.errors import InfrastructureError, ServerError
from infra.logs import log_tail
from infra.processes import GuardedProcess, end_stale, process_token

PARENT = Path("/var/tmp")
DEBIANS = Path("/usr/lib/postgresql")
USER, DATABASE = "draftsmith", "postgres"
START_SECONDS = 60.0
POLL_SECONDS = 0.1
# It waits for its clients on TERM; they have ended before it.
STOP_SECONDS = 20.0


class LocalPostgres:
    """A context manager; stopped and entered again, it has the same database.

    Args:
        name: of what it serves; the same name gives the same database.
        programs: folder of `initdb` and `postgres`, from `installed()`.
    """

    def __init__(self, name: str, programs: Path) -> None:
        self._token = process_token("local-postgres", name)
        self.folder = PARENT / f"draftsmith-postgres-{self._token}"
        self._programs = programs
        self._as_user = _as_postgres() if os.geteuid() == 0 else []
        self._process: GuardedProcess | None = None

    @property
    def url(self) -> str:
        """For SQLAlchemy's asyncpg driver. Whoever can enter the folder may use it, so it holds no password."""
        return f"postgresql+asyncpg://{USER}@/{DATABASE}?host={self.folder}"

    def __enter__(self) -> LocalPostgres:
        """Start it and return when it takes connections.

        Raises:
            InfrastructureError: its files cannot be made, or are another user's.
            ServerError: it ended at once, or was not ready within a minute.
        """
        end_stale(self._token)
        data, log = self.folder / "data", self.folder / "server.log"
        self._make_folder()
        if not (data / "PG_VERSION").exists():
            self._run("initdb", "--pgdata", str(data), "--username", USER, "--auth", "trust", "--encoding", "UTF8")
        argv = [*self._as_user, str(self._programs / "postgres"), "-D", str(data), "-k", str(self.folder)]
        argv += ["-c", "listen_addresses=", "-c", "unix_socket_permissions=0700"]
        self._process = GuardedProcess.start(argv, token=self._token, log_path=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                self._stop()
                how = "was not ready in time" if code is None else f"ended with {code}"
                raise ServerError(f"PostgreSQL {how}: {' | '.join(log_tail(log))}")
            time.sleep(POLL_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def poll(self) -> int | None:
        """Exit code of a server that has ended by itself, None while it runs."""
        return self._process.poll() if self._process else None

    def remove(self) -> None:
        """Delete the database."""
        end_stale(self._token)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop(STOP_SECONDS)
            self._process = None

    def _answers(self) -> bool:
        command = [str(self._programs / "pg_isready"), "-q", "-h", str(self.folder), "-U", USER, "-d", DATABASE]
        return subprocess.run(command, check=False).returncode == 0

    def _make_folder(self) -> None:
        owner = int(self._as_user[1].partition("=")[2]) if self._as_user else os.geteuid()
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700)
                os.chown(self.folder, owner, -1)
            found = self.folder.lstat()
        except OSError as error:
            raise InfrastructureError(f"{self.folder} cannot be made: {error}") from error
        if found.st_uid != owner or found.st_mode & 0o077 or self.folder.is_symlink():
            raise InfrastructureError(f"{self.folder} is not ours alone; remove it and start again")

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._programs / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InfrastructureError(f"{program} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def installed() -> Path | None:
    """Folder of PostgreSQL's programs; None where they are not installed, or cannot be run by this user.

    Debian keeps them off the PATH, one folder for each major version: the newest is taken.
    """
    if os.geteuid() == 0 and not _as_postgres():
        return None
    on_path = shutil.which("postgres")
    debians = sorted(DEBIANS.glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]), reverse=True)
    folders = [Path(program).resolve().parent for program in ([on_path] if on_path else debians)]
    needed = ("postgres", "initdb", "pg_isready")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


def _as_postgres() -> list[str]:
    """What root puts before a command to run it as the user `postgres`; empty where that cannot be."""
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        return []
    program = shutil.which("setpriv")
    return [program, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"] if program else []
