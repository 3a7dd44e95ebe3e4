"""Where an artifact came from: versions, git commit and hardware, for manifests and reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from infra.locations import project_home

PACKAGES = ("draftsmith", "prefect", "torch", "transformers", "speculators", "datasets", "openai", "pyarrow")


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Versions of the packages that decide what is written, by name; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """Commit of the checkout, with `-dirty` where it has changes; None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@lru_cache(maxsize=1)
def hardware() -> dict[str, Any]:
    """What the work ran on: processor model, cores, memory in GiB, GPUs by name."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30),
        "gpus": _gpus(),
    }


def hardware_name() -> str:
    """One line that tells machines of different speed apart: the GPUs, or the processor and its cores."""
    found = hardware()
    if found["gpus"]:
        return f"{len(found['gpus'])}x {found['gpus'][0]}"
    return f"{found['processor']}, {found['cores']} cores"


def provenance(**more: Any) -> dict[str, Any]:
    """The `provenance` of a manifest: versions, commit, hardware, and what the stage adds."""
    return {"versions": package_versions(), "git_commit": git_commit(), "hardware": hardware(), **more}


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=project_home(), capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
