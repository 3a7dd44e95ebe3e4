"""What a start has come to, from lines that vLLM writes."""

from __future__ import annotations

import pytest

from infra.serving.load_progress import last_information, load_milestone, refusal

# vLLM 0.32 on one GPU or several, shortened; a bar is redrawn with a carriage return.
LOG = [
    ("(APIServer pid=1) INFO 11-29 21:22:32 [model.py:733] Resolved architecture: LlamaForCausalLM\n", None),
    (
        "(Worker_TP0 pid=4) INFO 11-29 21:22:56 [gpu_model_runner.py:5040] Starting to load model /models/k2...\n",
        "weights: loading begins",
    ),
    (
        "\rLoading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]\n"
        "\rLoading safetensors checkpoint shards:  39% Completed | 25/64 [10:41<16:40, 25.66s/it]\n",
        "weights: 39 % (25 of 64)",
    ),
    (
        "\rMulti-thread loading shards: 100% Completed | 64/64 [00:41<00:00,  1.5it/s]\n",
        "weights: 100 % (64 of 64)",
    ),
    (
        "(Worker_TP0 pid=4) INFO [gpu_model_runner.py:5150] Model loading took 71.25 GiB memory and 1640.1 seconds\n",
        "weights are loaded, 71.25 GiB on each GPU",
    ),
    (
        "(Worker_TP0 pid=4) INFO [backends.py:1167] Dynamo bytecode transform time: 12.34 s\n",
        "compiling the model",
    ),
    ("(Worker_TP0 pid=4) INFO [monitor.py:20] torch.compile took 61.00 s in total\n", "compiled in 61.00 s"),
    (
        "(EngineCore pid=3) INFO [kv_cache_utils.py:2327] GPU KV cache size: 1,093,184 tokens, Maximum concurrency\n",
        "KV cache of 1,093,184 tokens",
    ),
    (
        "\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  25%|██▌       | 17/67 [00:02<00:06,  8.0it/s]",
        "CUDA graphs: 25 %",
    ),
    (
        "\n(EngineCore pid=3) INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 98.10 s "
        "(compilation: 61.00 s)\n",
        "the engine is up (98.10 s), the API comes",
    ),
]


@pytest.mark.parametrize("number", range(len(LOG)))
def test_the_latest_milestone_counts(number: int) -> None:
    text = "".join(line for line, _ in LOG[: number + 1])
    assert load_milestone(text) == LOG[number][1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        (LOG[0][0], "Resolved architecture: LlamaForCausalLM"),
        (
            LOG[0][0] + "(APIServer pid=1) WARNING 11-29 [vllm.py:725] Model Runner V2 requires Triton\n  File x",
            "Resolved architecture: LlamaForCausalLM",
        ),
    ],
)
def test_before_the_first_it_is_the_last_information_alone(text: str, said: str) -> None:
    assert last_information(text) == said


def test_what_its_validation_refuses_is_told_in_its_words() -> None:
    text = (
        "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=7)   Value error, max_model_len (99999) is greater than 8192. [type=value_error, input_value=()]\n"
    )
    assert refusal(LOG[0][0] + text) == "max_model_len (99999) is greater than 8192."
    assert refusal("".join(line for line, _ in LOG) + "ValueError: no room [type=x]") is None
