"""The README names every module and nothing that is not there, and what it and the guide show of a config is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flows.config import PipelineConfig, load_config

HOME = Path(__file__).resolve().parents[1]
README = (HOME / "README.md").read_text(encoding="utf-8")
FILE_LIST = README.partition("## Every file in one line")[2]
MODULES = sorted(
    path.relative_to(HOME).as_posix()
    for room in ("flows", "tasks", "infra", "benchmarks")
    for path in (HOME / room).rglob("*.py")
    if path.stat().st_size  # a package's own file is empty
)
FOLDERS = ("flows", "tasks", "infra", "benchmarks", "tests", "docs", "deployments", ".ci")


def named_files() -> list[str]:
    """Paths in backticks: all of the list of files, elsewhere those that begin with a folder of the repository."""
    spans = set(re.findall(r"`([\w./-]+)`", README))
    listed = set(re.findall(r"^- `([^`]+)`", FILE_LIST, flags=re.MULTILINE))
    return sorted(listed | {span for span in spans if span.startswith(tuple(f"{each}/" for each in FOLDERS))})


def test_there_is_a_list_of_files() -> None:
    assert len(named_files()) > len(MODULES) > 50


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_line(module: str) -> None:
    lines = re.findall(rf"^- `{re.escape(module)}`: \S.+$", FILE_LIST, flags=re.MULTILINE)
    assert len(lines) == 1, f"README.md needs one line for {module} under 'Every file in one line'"


def test_it_names_no_file_that_is_not_there() -> None:
    absent = [name for name in named_files() if not (HOME / name).exists() and name != "benchmarks/NAME.py"]
    assert absent == []


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (HOME / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)`", README)) <= targets


def test_its_table_has_every_section_of_the_config() -> None:
    table = README.partition("## Configuration")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)[: len(PipelineConfig.model_fields)] == list(
        PipelineConfig.model_fields
    )


def test_its_example_is_a_right_config(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "config.yaml"
    path.write_text(example, encoding="utf-8")
    assert load_config(str(path)).verifier.model == "Qwen/Qwen3-8B"


def test_the_guide_s_examples_are_right_configs(tmp_path: Path) -> None:
    examples = re.findall(
        r"```yaml\n(.*?)```", (HOME / "docs/guide.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert len(examples) == 2
    for number, example in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(example, encoding="utf-8")
        assert load_config(str(path)).verifier.model == "/models/my-model"
