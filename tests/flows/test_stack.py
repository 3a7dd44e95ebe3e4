"""What the stack refuses to touch. Its life: tests/e2e/test_stack.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.stack import main


def test_a_folder_of_somebody_else_is_neither_used_nor_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    assert main(["up", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err == f"stack: --folder: {tmp_path} holds files that are no stack's; name another folder\n"
    assert main(["down", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "stack: ended=False removed=False\n"
    assert (tmp_path / "thesis.txt").exists()
