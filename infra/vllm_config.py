"""How vLLM is configured and started: one config, the flags and the variables that follow from it.

vLLM lives in an environment of its own (its pins and Prefect's exclude each other), so nothing here imports it.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from infra.config import CONTENT, Config, InputPath
from infra.errors import InputError
from infra.locations import project_home
from infra.redaction import SECRET_NAME

# What VllmServer or a field of VllmConfig sets; given once more as a free flag it would win unseen.
_OWN_FLAGS = {
    "--api-key": None,
    "--host": None,
    "--model": None,
    "--port": None,
    "--served-model-name": None,
    "--speculative-config": None,
    "--sc": None,
    # Secrets would stand in the process list and in the results; a file of flags would be in no key.
    "--hf-token": "HF_TOKEN in the environment of this program",
    "--config": "each flag here, or its field",
    "--trust-remote-code": "verifier.trust_remote_code",
    "--data-parallel-size": "vllm.data_parallel_size",
    "--dp": "vllm.data_parallel_size",
    "--dtype": "vllm.dtype",
    "--enable-auto-tool-choice": "vllm.tool_parser",
    "--enforce-eager": "vllm.enforce_eager",
    "--gpu-memory-utilization": "vllm.gpu_memory_utilization",
    "--max-model-len": "vllm.max_model_len",
    "--pipeline-parallel-size": "vllm.pipeline_parallel_size",
    "--pp": "vllm.pipeline_parallel_size",
    "--reasoning-parser": "vllm.reasoning_parser",
    "--tensor-parallel-size": "vllm.tensor_parallel_size",
    "--tool-call-parser": "vllm.tool_parser",
    "--tp": "vllm.tensor_parallel_size",
}
# Fields that came later: at their defaults they must not change the key of an evaluation that has been made.
_LATER_FIELDS = ("tool_parser", "pipeline_parallel_size", "data_parallel_size")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class VllmConfig(Config):
    """How vLLM is started, for generation, extraction and evaluation alike."""

    python: InputPath | None = None
    """Interpreter of vLLM's environment; by default the checkout's `.venv-vllm/bin/python`."""
    environment: dict[str, str] = Field(default={})
    """Variables to add for vLLM, such as CUDA_VISIBLE_DEVICES or VLLM_CPU_KVCACHE_SPACE (GiB). No secrets: vLLM
    inherits the environment of this program, and what stands here is stored with the results."""
    max_model_len: Annotated[int | None, CONTENT, Field(ge=2)] = None
    """Longest sequence, in tokens, prompt and completion together; by default what the model declares."""
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], CONTENT] = "auto"
    """Type of weights and activations; `auto` is the one of the checkpoint."""
    reasoning_parser: Annotated[str | None, CONTENT] = None
    """vLLM's parser that tells the model's thinking from its answer, such as `qwen3` or `deepseek_r1`."""
    tool_parser: Annotated[str | None, CONTENT] = None
    """vLLM's parser of tool calls, such as `hermes` or `kimi_k2`; without one they stay in the answer's text."""
    model_args: Annotated[list[str], CONTENT] = Field(default=[])
    """Further flags that change what the model writes, such as `--quantization=fp8` or `--chat-template=FILE`."""
    extra_args: list[str] = Field(default=[])
    """Further flags that only change how fast it is, such as `--max-num-seqs=512`."""
    enforce_eager: bool = False
    """Do not compile the model or capture CUDA graphs: a faster start, slower generation."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that each layer of one model is spread over."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Groups of such GPUs that the layers are shared out among."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Engines of one server, each with GPUs of its own; what a mixture of experts may gain from. Only servers have
    it: extraction has `extract.engines`."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of each GPU's memory that vLLM may take (of the machine's memory, on a CPU without
    VLLM_CPU_KVCACHE_SPACE)."""
    startup_timeout_seconds: float = Field(default=2700.0, gt=0.0)
    """How long loading the model may take; half an hour is usual for 1 TB of weights."""

    @property
    def gpus_per_server(self) -> int:
        return self.gpus_per_engine * self.data_parallel_size

    @property
    def gpus_per_engine(self) -> int:
        """Of one that holds the model once, as extraction's engines do."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def for_generation(self) -> VllmConfig:
        """The same with one token less: extraction must be able to add one to whatever was generated."""
        if self.max_model_len is None:
            return self
        return self.model_copy(update={"max_model_len": self.max_model_len - 1})

    def without_prefix_caching(self) -> VllmConfig:
        """The same, but each request computes all of its prompt."""
        return self.model_copy(update={"extra_args": [*self.extra_args, "--no-enable-prefix-caching"]})

    def on_gpus(self, gpus: Sequence[int | str]) -> VllmConfig:
        """The same on these GPUs only."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return self.model_copy(update={"environment": self.environment | visible})

    def how_served(self) -> dict[str, Any]:
        """What of this may change how fast a server is, as an evaluation's key has it."""
        fields = self.model_dump(mode="json", exclude={"python", "startup_timeout_seconds"})
        defaults = {name: type(self).model_fields[name].default for name in _LATER_FIELDS}
        return {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}

    @field_validator("model_args", "extra_args")
    @classmethod
    def _no_own_flags(cls, flags: list[str]) -> list[str]:
        for flag in flags:
            name = "--" + flag.split("=")[0].lstrip("-").replace("_", "-")
            # vLLM takes a flag's beginning for the flag.
            owned = next((own for own in _OWN_FLAGS if own.startswith(name)), None)
            if flag.startswith("-") and owned is not None:
                owner = _OWN_FLAGS[owned]
                said = f"set {owner}" if owner else "it is set for you"
                raise ValueError(f"{flag.partition('=')[0]} is not allowed here: {said}")
        return flags

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an environment variable")
            if SECRET_NAME.search(name):
                raise ValueError(
                    f"{name} looks like a secret: export it in the environment of this program instead"
                )
        return environment

    def interpreter(self) -> Path:
        """The interpreter of vLLM's environment.

        Raises:
            InputError: it does not exist or cannot be executed.
        """
        # Not resolved: a virtual environment is known by its link to the interpreter.
        path = project_home() / Path(self.python or ".venv-vllm/bin/python").expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise InputError(
                "vllm.python", f"there is no interpreter {path}; run `make setup`, or name the one that has vLLM"
            )
        return path


def engine_flags(config: VllmConfig, *, model_path: str | Path, trust_remote_code: bool = False) -> list[str]:
    """The engine's part of vLLM's command line, the same for a server and for an offline engine."""
    flags = ["--model", str(model_path), "--dtype", config.dtype]
    flags += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if config.pipeline_parallel_size > 1:
        flags += ["--pipeline-parallel-size", str(config.pipeline_parallel_size)]
    flags += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    if config.max_model_len is not None:
        flags += ["--max-model-len", str(config.max_model_len)]
    if config.reasoning_parser is not None:
        flags += ["--reasoning-parser", config.reasoning_parser]
    if config.enforce_eager:
        flags.append("--enforce-eager")
    if trust_remote_code:
        flags.append("--trust-remote-code")
    return [*flags, *config.model_args, *config.extra_args]


def server_flags(config: VllmConfig, *, model_path: str | Path, trust_remote_code: bool = False) -> list[str]:
    """The flags of a server: the engine's, and those that only a server knows."""
    flags = engine_flags(config, model_path=model_path, trust_remote_code=trust_remote_code)
    if config.data_parallel_size > 1:
        flags += ["--data-parallel-size", str(config.data_parallel_size)]
    if config.tool_parser is not None:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_parser]
    return flags


def engine_environment(config: VllmConfig, *, model_path: str | Path) -> dict[str, str]:
    """Variables to add for a process of vLLM's; no secrets among them."""
    added = {
        "VLLM_NO_USAGE_STATS": "1",
        # Neither this project's packages nor the pipeline's environment may shadow what vLLM imports.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": "",
    }
    if os.path.isdir(model_path):
        added["HF_HUB_OFFLINE"] = "1"
    return {**added, **config.environment}


_VERSION_PROGRAM = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def vllm_version(config: VllmConfig) -> str:
    """Version of vLLM in its environment, such as "0.32.0", without importing it. Blocks some 0.1 s, once.

    Raises:
        InputError: the interpreter is not there, or has no vLLM.
    """
    return _version_of(config.interpreter())


@functools.cache
def _version_of(interpreter: Path) -> str:
    try:
        asked = subprocess.run(
            [interpreter, "-I", "-c", _VERSION_PROGRAM], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError("vllm.python", f"{interpreter} does not work: {error}") from error
    version = asked.stdout.strip()
    if not version:
        raise InputError("vllm.python", f"{interpreter} has no vLLM; run `make setup`, or name the one that has it")
    return version


def portable_flags(arguments: Sequence[str], names: Mapping[str, str]) -> str:
    """A server's command line as one string without this machine's paths, fit for keys, rows and reports.

    Args:
        arguments: the command line, as `VllmServer.flags` gives it.
        names: what to write in place of each local path, for example {verifier.path: verifier.name}.
    """
    portable = []
    for argument in arguments:
        for path in sorted(names, key=len, reverse=True):  # a folder must not eat the front of a longer path
            argument = argument.replace(path, names[path])
        portable.append(argument)
    return shlex.join(portable)
