"""Imports point one way: flows -> tasks -> infra; and some rooms know less than others."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "tasks", "infra")
MAY_IMPORT = {"flows": {"flows", "tasks", "infra"}, "tasks": {"tasks", "infra"}, "infra": {"infra"}}
INSIDE_VLLM = ("infra/vllm_connector.py", "infra/extract_worker.py")
STDLIB_ONLY = ("infra/guard.py",)


def imported(path: Path) -> set[str]:
    """Dotted names of every absolute import of a file, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            found.add(node.module or "")
    return found


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


FILES = sorted(path for room in ROOMS for path in (HOME / room).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(HOME).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    room = relative(path).partition("/")[0]
    names = imported(path)
    assert top(names) & set(ROOMS) <= MAY_IMPORT[room]
    assert "tests" not in top(names)
    if room == "infra":
        assert "prefect" not in top(names), "Prefect is imported in flows/ and tasks/ only"
    if not relative(path).startswith("infra/stores/s3"):
        assert not top(names) & {"fsspec", "s3fs"}, "infra/stores/s3*.py are the only users of fsspec and s3fs"


@pytest.mark.parametrize("name", INSIDE_VLLM)
def test_what_runs_inside_vllm_imports_nothing_of_ours(name: str) -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "safetensors", "vllm"}
    # The worker loads the connector that lies beside it, in the same environment.
    assert top(imported(HOME / name)) <= allowed | {"vllm_connector"}


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_the_guard_starts_fast(name: str) -> None:
    assert top(imported(HOME / name)) <= set(sys.stdlib_module_names)


def test_every_folder_of_modules_is_a_package() -> None:
    for folder in {path.parent for path in FILES}:
        assert (folder / "__init__.py").exists()
