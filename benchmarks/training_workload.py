"""What the training benchmark trains on: a random verifier, a vocabulary map, and one set of samples in every form.

The values are random, their shapes, types and spread are real: states like `torch.randn`, whose bf16 bytes compress
about as states of a language model do. The samples go into Parquet shards of each encoding and into the files that
speculators' trainer reads, by several processes at once.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from infra import manifest, storage
from infra.drafts.vocab import FILE_NAME, VocabMap
from infra.fingerprint import stage_content
from infra.hidden_states import HiddenRow, HiddenStatesMeta, encode
from infra.manifest import Shard, StageRef
from infra.training.config import TrainConfig, TrainSpec


@dataclass(frozen=True)
class Size:
    """How large the benchmark is."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    heads: int = 32
    kv_heads: int = 8
    verifier_vocab_size: int = 40_000
    draft_vocab_size: int = 32_000
    total_seq_len: int = 8192
    num_shards: int = 16
    samples_per_shard: int = 16
    min_tokens: int = 400
    max_tokens: int = 1600
    prompt_share: float = 0.22
    """Share of each sample's tokens that is its prompt, and not trained on."""
    timed_steps: int = 20
    fed_steps: int = 80
    layer_ids: tuple[int, ...] = (2, 16, 29, 32)

    @property
    def num_samples(self) -> int:
        return self.num_shards * self.samples_per_shard


FULL = Size()
TINY = Size(
    hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, verifier_vocab_size=160, draft_vocab_size=128,
    total_seq_len=256, num_shards=4, samples_per_shard=8, min_tokens=20, max_tokens=90, timed_steps=3, fed_steps=6,
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Where everything lies.

    Args:
        size: of everything.
        folder: of everything.
        encodings: those of `infra.hidden_states` that were written.
    """

    size: Size
    folder: Path
    encodings: tuple[str, ...]

    @property
    def peer_folder(self) -> Path:
        """What speculators' trainer reads: an Arrow data set, and hidden_states/hs_<n>.safetensors beside it."""
        return self.folder / "peer"

    def spec(self, config: TrainConfig, encoding: str = "bf16") -> TrainSpec:
        """What the trainer is started with."""
        root = str(self.folder / encoding)
        return TrainSpec(
            train=config,
            hidden_states_uri=_stage(root).uri,
            vocab_uri=str(self.folder / FILE_NAME),
            draft_uri=str(self.folder / "draft"),
            lease_epoch=1,
            verifier_path=str(self.folder / "verifier"),
            aux_hidden_state_layer_ids=self.size.layer_ids[:-1],
            metrics_path=str(self.folder / "metrics.jsonl"),
        )


def write_verifier(workload: Workload) -> None:
    """A verifier's config with the only weights that a draft takes from it, and the vocabulary map."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    size, folder = workload.size, workload.folder / "verifier"
    LlamaConfig(
        vocab_size=size.verifier_vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layer_ids[-1],
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden_size // size.heads,
        max_position_embeddings=max(4096, size.total_seq_len),
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    draw = torch.Generator().manual_seed(1)
    shape = (size.verifier_vocab_size, size.hidden_size)
    weights = {
        "model.embed_tokens.weight": torch.randn(shape, generator=draw).mul_(0.5).bfloat16(),
        "lm_head.weight": torch.randn(shape, generator=draw).mul_(2 / size.hidden_size**0.5).bfloat16(),
        "model.norm.weight": torch.ones(size.hidden_size, dtype=torch.bfloat16),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    t2d = torch.zeros(size.verifier_vocab_size, dtype=torch.bool)
    t2d[: size.draft_vocab_size] = True
    vocab = VocabMap(torch.zeros(size.draft_vocab_size, dtype=torch.long), t2d, t2d.long())
    storage.put(str(workload.folder / FILE_NAME), vocab.to_bytes())


def write_samples(workload: Workload, *, peer: bool) -> None:
    """All shards of all encodings and, if asked for, the peer's files.

    Effects:
        Starts one process for each core but one.
    """
    size = workload.size
    stages = [_stage(str(workload.folder / encoding)) for encoding in workload.encodings]
    for stage in stages:
        manifest.write_plan(stage, [Shard(f"{number:05d}") for number in range(size.num_shards)])
    if peer:
        (workload.peer_folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    cores = max(1, min(size.num_shards, len(os.sched_getaffinity(0)) - 1, 15))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as processes:
        jobs = [processes.submit(_write_shard, workload, number, peer) for number in range(size.num_shards)]
        rows = [row for job in jobs for row in job.result()]
    for stage in stages:
        manifest.finish(stage, {})
    if peer:
        from datasets import Dataset

        table = {"input_ids": [ids for ids, _ in rows], "loss_mask": [mask for _, mask in rows]}
        table["seq_len"] = [len(ids) for ids, _ in rows]
        data = Dataset.from_dict(table)
        data.set_format("torch")
        data.save_to_disk(str(workload.peer_folder))


def _stage(root: str) -> StageRef:
    return StageRef(root, "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))


def _write_shard(workload: Workload, number: int, peer: bool) -> list[tuple[list[int], list[bool]]]:
    """Returns input_ids and loss_mask of each row."""
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    size = workload.size
    samples = [sample(size, number * size.samples_per_shard + place) for place in range(size.samples_per_shard)]
    for encoding in workload.encodings:
        stage = _stage(str(workload.folder / encoding))
        shard = manifest.read_plan(stage.uri)[number]
        meta = HiddenStatesMeta(size.layer_ids, size.hidden_size, "random", encoding=encoding)
        data = encode([_row(name, *parts) for name, *parts in samples], meta)
        manifest.commit_shard(stage, shard, data, rows=len(samples), status_counts={"ok": len(samples)}, inputs={})
    if peer:
        for place, (_, ids, _, states) in enumerate(samples):
            path = (
                workload.peer_folder / "hidden_states" / f"hs_{number * size.samples_per_shard + place}.safetensors"
            )
            save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
    return [(ids, mask) for _, ids, mask, _ in samples]


def _row(name: str, ids: Sequence[int], mask: Sequence[bool], states: Tensor) -> HiddenRow:
    return HiddenRow(name, "ok", None, ids, mask, states)


def sample(size: Size, number: int) -> tuple[str, list[int], list[bool], Tensor]:
    """Name, input_ids, loss_mask and states [tokens, layers, hidden] of one sample."""
    draw = torch.Generator().manual_seed(number)
    length = int(torch.randint(size.min_tokens, size.max_tokens + 1, (1,), generator=draw))
    ids = torch.randint(0, size.verifier_vocab_size, (length,), generator=draw).tolist()
    prompt = max(1, int(length * size.prompt_share))
    states = torch.empty(length, len(size.layer_ids), size.hidden_size, dtype=torch.bfloat16)
    states.normal_(generator=draw)
    return f"sample/{number}", ids, [place >= prompt for place in range(length)], states
