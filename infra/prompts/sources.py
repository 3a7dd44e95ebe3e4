"""The rows of a prompt source and the revision of its content, wherever it comes from."""

from __future__ import annotations

import glob
import importlib.metadata
import tempfile
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from infra import storage
from infra.errors import InputError
from infra.fingerprint import content_sha256
from infra.folders import file_sha256
from infra.locations import not_there, package_files, project_home
from infra.prompts import hub as prompt_hub
from infra.prompts.config import PromptSource
from infra.prompts.files import Entry, read_entries

# Raised when the text built from HumanEval's data changes; part of the data set's revision.
HUMAN_EVAL_RECIPE = 1
HUMAN_EVAL_TEXT = "Complete the following Python function.\n\n```python\n{code}\n```"


Entries = Generator[Entry, None, None]


@dataclass(frozen=True)
class OpenSource:
    """Where a source's content stands fast.

    Attributes:
        revision: commit, package version or content hash; never a path.
        entries: its rows, from that very content; read once.
    """

    revision: str
    entries: Entries


def open_source(source: PromptSource, where: str) -> OpenSource:
    """Find a source and its revision; its rows are read (and downloaded) only as `entries` is iterated.

    Args:
        where: name of the config field (`prompts.sources[0].file`), for errors.

    Raises:
        InputError: it is not there, not installed, or cannot be read (also while `entries` is iterated).
        InfrastructureError: the hub or the object store did not answer.
    """
    if source.package:
        return _open_package(source.package, where)
    if source.file:
        return _open_files(source.file, where)
    return _open_hub(source, where)


def _open_hub(source: PromptSource, where: str) -> OpenSource:
    hub = str(source.hub)
    commit = prompt_hub.resolve_commit(hub, source.revision, where)

    def entries() -> Entries:
        folder = prompt_hub.fetch(hub, commit, source.revision, source.files, where)
        if source.files:
            yield from prompt_hub.read_files(folder, hub, source.files, where)
        else:
            yield from prompt_hub.read_split(folder, hub, source.subset, source.split or "train", where)

    return OpenSource(f"{hub}@{commit}", entries())


# --- packages ---


def _open_package(package: str, where: str) -> OpenSource:
    try:
        files = package_files(package, "HumanEval.jsonl.gz")
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(where, f"the package {package} is not installed here; install it with pip") from error
    if not files:
        raise InputError(where, f"{package} {version} carries no HumanEval.jsonl.gz; reinstall it")
    revision = f"{package}=={version} sha256:{file_sha256(files[0])} recipe:{HUMAN_EVAL_RECIPE}"
    rows = read_entries(files[0], files[0].name, where)
    return OpenSource(revision, (_human_eval(row) for row in rows))


def _human_eval(entry: Entry) -> Entry:
    """A HumanEval task as a request to complete the function."""
    if isinstance(entry, dict) and isinstance(code := entry.get("prompt"), str):
        return {"prompt": HUMAN_EVAL_TEXT.format(code=code.strip("\n ")), "domain": "code"}
    return entry


# --- files ---


def _open_files(file: str, where: str) -> OpenSource:
    try:
        hashes = _hashes(file)
    except InputError as error:
        raise InputError(where, error.problem) from error
    # One file's revision is that of the file alone, so that a pattern which finds it gives the same.
    digest = next(iter(hashes.values())) if len(hashes) == 1 else content_sha256(list(hashes.values()))
    revision = f"sha256:{digest}" if len(hashes) == 1 else f"sha256:{digest} files:{len(hashes)}"
    return OpenSource(revision, _entries(hashes, where))


def _hashes(file: str) -> dict[str, str]:
    """sha256 of every file that `file` names, by its URI, in the order of their names."""
    place = file if "://" in file else str(project_home() / Path(file).expanduser())
    try:
        found = _matching(place) if "*" in file or "?" in file else [place]
        if found:
            return {uri: storage.sha256(uri) for uri in found}
    except FileNotFoundError:
        pass
    raise InputError("file", not_there(file))


def _matching(pattern: str) -> list[str]:
    """URIs of the files that a pattern names, sorted."""
    if "://" not in pattern:
        return sorted(path for path in glob.glob(pattern) if Path(path).is_file())
    fixed = pattern.partition("*")[0].partition("?")[0].rpartition("/")[0]
    rest = PurePosixPath(pattern.removeprefix(f"{fixed}/"))
    names = [PurePosixPath(name) for name in storage.list_objects(fixed)]
    wanted = [name for name in names if len(name.parts) == len(rest.parts) and name.match(str(rest))]
    return [storage.join(fixed, str(name)) for name in sorted(wanted)]


def _entries(hashes: dict[str, str], where: str) -> Entries:
    with tempfile.TemporaryDirectory(prefix="draftsmith-prompts-") as folder:
        for uri, sha256 in hashes.items():
            name = uri.rsplit("/", 1)[-1]
            path = Path(uri.removeprefix("file://"))
            try:
                if uri.startswith("s3://"):
                    path = Path(folder, "prompts")
                    storage.get_file(uri, path)
                with closing(read_entries(path, name, where)) as entries:
                    yield from entries
                unchanged = file_sha256(path) == sha256
            except FileNotFoundError:
                unchanged = False
            if not unchanged:
                raise InputError(where, f"{name} was changed while it was read; run again")
