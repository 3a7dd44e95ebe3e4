"""A hidden_states stage, a vocabulary map and a tiny verifier: what the trainer reads, made in a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from infra import manifest, storage
from infra.drafts.vocab import FILE_NAME, VocabMap
from infra.fingerprint import stage_content
from infra.hidden_states import HiddenRow, HiddenStatesMeta, encode
from infra.manifest import Shard, StageRef
from infra.training.config import TrainConfig, TrainSpec

HIDDEN_SIZE = 32
VERIFIER_VOCAB_SIZE = 96
DRAFT_VOCAB_SIZE = 64
NUM_LAYERS = 6
LAYER_IDS = (1, 2, 4, 6)


def write_stage(root: str, rows: Sequence[Sequence[HiddenRow]], *metas: HiddenStatesMeta) -> str:
    """Commit one shard for each list of rows, of the meta in its place (the last for all later). Returns its URI."""
    stage = StageRef(root, "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))
    shards = manifest.write_plan(stage, [Shard(f"{number:05d}") for number in range(len(rows))])
    for number, (shard, content) in enumerate(zip(shards, rows, strict=True)):
        manifest.commit_shard(
            stage,
            shard,
            encode(content, metas[min(number, len(metas) - 1)]),
            rows=len(content),
            status_counts=Counter(row.status for row in content),
            inputs={},
        )
    manifest.finish(stage, {})
    return stage.uri


def write_verifier(folder: Path) -> Path:
    """A randomly initialized Llama, as Hugging Face saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VERIFIER_VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def vocabulary() -> VocabMap:
    """Every token but each third."""
    ids = torch.tensor([token for token in range(VERIFIER_VOCAB_SIZE) if token % 3 != 1])
    t2d = torch.zeros(VERIFIER_VOCAB_SIZE, dtype=torch.bool)
    t2d[ids] = True
    return VocabMap(ids - torch.arange(len(ids)), t2d, t2d.long())


def random_rows(num_samples: int, first: int = 0, num_layers: int = len(LAYER_IDS)) -> list[HiddenRow]:
    """Samples of 10 to 40 tokens, the first third of each a prompt."""
    rows = []
    for number in range(first, first + num_samples):
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(10, 41, (1,), generator=generator))
        ids = torch.randint(0, VERIFIER_VOCAB_SIZE, (length,), generator=generator).tolist()
        states = torch.randn(length, num_layers, HIDDEN_SIZE, generator=generator)
        mask = [place >= length // 3 for place in range(length)]
        rows.append(HiddenRow(f"sample/{number}", "ok", None, ids, mask, states.bfloat16()))
    return rows


def write_spec(folder: Path, train: TrainConfig, num_samples: int = 40, lease_epoch: int = 1) -> TrainSpec:
    """Everything a run reads, below `folder`, in two shards."""
    meta = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "revision")
    half = num_samples // 2
    hidden = write_stage(
        str(folder / "root"), [random_rows(half), random_rows(num_samples - half, first=half)], meta
    )
    vocab_uri = str(folder / "root" / "vocab" / FILE_NAME)
    storage.put(vocab_uri, vocabulary().to_bytes())
    return TrainSpec(
        train=train,
        hidden_states_uri=hidden,
        vocab_uri=vocab_uri,
        draft_uri=str(folder / "root" / "drafts" / "key"),
        lease_epoch=lease_epoch,
        verifier_path=str(write_verifier(folder / "verifier")),
        aux_hidden_state_layer_ids=LAYER_IDS[:-1],
        metrics_path=str(folder / "metrics.jsonl"),
    )
