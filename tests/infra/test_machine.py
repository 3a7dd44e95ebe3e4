"""A container's limits count where they are below what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import machine
from infra.machine import free_memory_bytes, usable_cores

MIB = 2**20


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group without limits, on a machine of 8 cores with 4,096 MiB free."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path / "group")
    monkeypatch.setattr(machine, "MEMORY_INFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "group").mkdir()
    return tmp_path / "group"


def test_without_limits_it_is_the_machine(group: Path) -> None:
    assert (usable_cores(), free_memory_bytes()) == (8, 4096 * MIB)
    for name, content in (("cpu.max", "max 100000\n"), ("memory.max", "max\n"), ("memory.current", "5\n")):
        (group / name).write_text(content)
    assert (usable_cores(), free_memory_bytes()) == (8, 4096 * MIB)


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("250000 100000", 3), ("5000 100000", 1), ("6400000 100000", 8)]
)
def test_a_share_of_the_cores(group: Path, quota: str, cores: int) -> None:
    (group / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == cores


@pytest.mark.parametrize(("limit_mib", "free_mib"), [(1024, 624), (300, 0), (65536, 4096)])
def test_a_limit_of_memory(group: Path, limit_mib: int, free_mib: int) -> None:
    (group / "memory.max").write_text(f"{limit_mib * MIB}\n")
    (group / "memory.current").write_text(f"{500 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 7\ninactive_file {100 * MIB}\nactive_file 9\n")
    assert free_memory_bytes() == free_mib * MIB


def test_what_this_machine_has_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert usable_cores() >= 1
    assert MIB < free_memory_bytes() < 2**50
