"""Model folders on local disk: content hash, seal, and a cheap look at whether the weights are whole."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import safe_open

from infra.errors import InputError
from infra.fingerprint import content_sha256, sha256_hex
from infra.locations import cache_folder, not_there, project_home

logger = logging.getLogger("draftsmith.folders")

SEAL_NAME = "files.json"
# A file changed this shortly before it was hashed may change again within the same tick of its time stamp.
_SETTLED_SECONDS = 2.0
_LARGE_BYTES = 2**30
_HASH_THREADS = 8


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, in hex; memory stays bounded."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha256(folder: Path) -> str:
    """Content hash of a folder: over the relative names and sha256 of all files that are not hidden.

    Hashing a large model takes minutes, so hashes are kept in the cache folder and reused while a file's size and
    time stamps stay the same.

    Effects: writes `$DRAFTSMITH_CACHE/hashes/<hash of the path>.json`.
    """
    memory = cache_folder() / "hashes" / f"{sha256_hex(str(folder.resolve()).encode())[:32]}.json"
    known = read_json(memory)
    stamps = {path.relative_to(folder).as_posix(): _stamp(path) for path in _visible_files(folder)}
    hashes = {name: known[name][1] for name, stamp in stamps.items() if _remembers(known.get(name), stamp)}
    missing = [name for name in stamps if name not in hashes]
    size_bytes = sum(stamps[name][0] for name in missing)
    if size_bytes > _LARGE_BYTES:
        logger.info("Hashing %.1f GiB of %s; kept for the next time.", size_bytes / 2**30, folder)
    hashed_at_ns = time.time_ns()
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        hashes |= zip(missing, pool.map(lambda name: file_sha256(folder / name), missing), strict=True)
    settled_ns = hashed_at_ns - int(_SETTLED_SECONDS * 1e9)
    settled = {name: [s, hashes[name]] for name, s in stamps.items() if max(s[1:]) < settled_ns}
    if settled != known:
        _write_json(memory, settled)
    return content_sha256(hashes)


def seal(folder: Path) -> None:
    """Write down size and sha256 of every file, so that `is_sealed` can tell a whole folder from a torn one."""
    files = {
        path.relative_to(folder).as_posix(): {"size_bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in _visible_files(folder)
    }
    _write_json(folder / SEAL_NAME, {"files": files})


def is_sealed(folder: Path) -> bool:
    """Whether the folder is sealed and every file is there as it was. Reads all of it."""
    files = read_json(folder / SEAL_NAME).get("files")
    if not isinstance(files, dict) or not files:
        return False
    try:
        # Sizes first: a torn file is then found without reading the others.
        return all((folder / name).stat().st_size == entry["size_bytes"] for name, entry in files.items()) and all(
            file_sha256(folder / name) == entry["sha256"] for name, entry in files.items()
        )
    except (OSError, KeyError, TypeError):
        return False


def named_folder(name: str, field: str, right: str) -> Path | None:
    """The local folder that a config names, None when it is a hub id. A path that is still relative
    (`config.InputPath`) starts at the project's home.

    Args:
        field: config field to name in errors.
        right: what would be right, where nothing is at a path.

    Raises:
        InputError: it is a path, and no folder is there.
    """
    path = project_home() / Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise InputError(field, f"{path} is a file; name the folder of the checkpoint")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise InputError(field, f"{not_there(name)}; {right}")
    return None


def tensor_files(folder: Path) -> dict[str, str]:
    """The file of each tensor of a safetensors checkpoint: from its index file, else from the header of each file.

    Raises:
        OSError, ValueError, SafetensorError: it cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return dict(json.loads(index.read_bytes())["weight_map"])
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    return found


def weights_problem(folder: Path) -> str | None:
    """What keeps this folder from being a loadable safetensors checkpoint, or None. Reads headers only."""
    if not (folder / "config.json").is_file():
        return "it holds no config.json"
    names = {path.name for path in folder.glob("*.safetensors")}
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    wanted = set(index.values()) if isinstance(index, dict) else names
    if not wanted:
        return "it holds no *.safetensors weights (pickled weights are not loaded; convert them first)"
    if absent := sorted(wanted - names):
        return f"{len(absent)} of its {len(wanted)} weight files are absent, {absent[0]} for one"
    broken = next((name for name in sorted(wanted) if not _is_whole_safetensors(folder / name)), None)
    return f"{broken} is cut short or no safetensors file; fetch it again" if broken else None


def _is_whole_safetensors(path: Path) -> bool:
    """The file ends where its header says: eight bytes of header length, the header, then the tensors."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        size_bytes = path.stat().st_size
        if not 2 <= header_bytes <= size_bytes - 8:
            return False
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return False
    return bool(size_bytes == 8 + header_bytes + max(ends, default=0))


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files below the folder in a fixed order; hidden ones (.git, .cache, .DS_Store) and the seal left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(parent, name) != folder / SEAL_NAME:
                yield Path(parent, name)


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _remembers(entry: Any, stamp: list[int]) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp and isinstance(entry[1], str)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is none or it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    staged.write_text(json.dumps(value, sort_keys=True), encoding="utf-8")
    os.replace(staged, path)
