"""What the trainer must know of EAGLE-3: the alignment of a sample, the two forward passes, and the loss call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infra.training.algorithm import Objective
from infra.training.batch import PackedBatch
from infra.training.config import DraftSpec, TrainConfig, TrainSpec
from infra.training.eagle3_model import build_model
from infra.training.packed import PackedForward, unsupported
from infra.training.packed_plan import PackPlan, plan_pack, row_capacity, trained_rows, upload
from infra.training.rows import StepSums, forward_rows, plan_rows

logger = logging.getLogger("draftsmith.training")

# Columns of an objective's sums, one row per TTT step. `rows` counts those with a target at this TTT step, `judged`
# those with one at every TTT step so far. Of the latter, `correct` counts rows whose guesses so far all are the
# verifier's own first choice, and `total` rows whose guesses before this one were. So correct / total is the
# conditional accuracy and correct / judged the full one: sums and counts are over the same rows.
SUM_COLUMNS = ("loss", "rows", "correct", "total", "judged")


@dataclass(frozen=True)
class PreparedPack:
    """A packed batch with all that the host must work out of it before the device has it.

    Args:
        num_loss_tokens: trained tokens of this pack.
        documents: [total_seq_len], the number of each token's sample, -1 for padding; for `library` only.
        valid: [ttt_steps, total_seq_len], see `packed_plan.trained_rows`; for `library` only.
        plan: for `packed` only.
    """

    batch: PackedBatch
    num_loss_tokens: int
    documents: Tensor | None = None
    valid: Tensor | None = None
    plan: PackPlan | None = None

    def to(self, device: torch.device) -> PreparedPack:
        """The same on `device`, without waiting for it."""
        small = ("input_ids", "loss_mask", "position_ids")
        uploaded: dict[str, Any] = {name: upload(getattr(self.batch, name), device) for name in small}
        batch = replace(self.batch, **uploaded)
        return PreparedPack(
            batch.to(device),
            self.num_loss_tokens,
            None if self.documents is None else upload(self.documents, device),
            None if self.valid is None else upload(self.valid, device),
            None if self.plan is None else self.plan.to(device),
        )


class Eagle3:
    """EAGLE-3 as the loop sees it (`infra.training.algorithm.Algorithm`)."""

    def objective(self, spec: TrainSpec, vocab: bytes, *, cuda: bool) -> Objective:
        from infra.drafts.vocab import VocabMap

        model = build_model(
            spec.train,
            VocabMap.from_bytes(vocab),
            spec.verifier_path,
            spec.aux_hidden_state_layer_ids,
            trust_remote_code=spec.trust_remote_code,
            attention="simple_flex_attention" if cuda else "eager",
        )
        kind = spec.train.implementation
        if kind == "auto":
            kind = "packed" if cuda else "rows"
        return Eagle3Objective(model, spec.train, kind, compiled=cuda)

    def check_start(self, spec: DraftSpec, folder: Path, verifier_vocab_size: int) -> None:
        from infra.training.eagle3_start import check_start

        check_start(spec, folder, verifier_vocab_size)

    def start_weights(self, spec: TrainSpec, folder: Path, vocab: bytes) -> dict[str, Tensor]:
        from infra.drafts.vocab import VocabMap
        from infra.training.eagle3_start import start_weights

        return start_weights(spec, folder, VocabMap.from_bytes(vocab))


class Eagle3Objective(Objective):
    """The draft and its loss.

    Args:
        model: an Eagle3DraftModel.
        implementation: `rows`, `packed` or `library` (see TrainConfig.implementation). The first two are written
            for KL, and `packed` for the common shapes of a draft: anything else goes through the library.
        compiled: whether `packed` compiles its pieces.
    """

    def __init__(self, model: Any, config: TrainConfig, implementation: str, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.implementation = _implementation(model, config, implementation)
        self.fallback = "library" if self.implementation == "packed" else "rows"
        self.capacity: int | None = None
        self.sums_shape = (config.ttt_steps, len(SUM_COLUMNS))
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.packed = PackedForward(dtype, compiled=compiled, recompute=config.activation_checkpointing)

    def prepare(self, batch: PackedBatch) -> PreparedPack:
        """What `forward` takes, of a batch on the CPU."""
        plan = documents = valid = None
        config = self.config
        if self.implementation == "packed":
            plan = plan_pack(batch, config.total_seq_len, config.ttt_steps, config.num_layers, self.capacity)
        elif self.implementation == "library":
            num_tokens = max(config.total_seq_len, batch.num_tokens)
            documents = nn.functional.pad(batch.document_ids, (0, num_tokens - batch.num_tokens), value=-1)
            valid = trained_rows(batch, num_tokens, config.ttt_steps)
        return PreparedPack(batch, batch.num_loss_tokens, documents, valid, plan)

    def expect(self, packs: Sequence[tuple[int, int]]) -> None:
        # A trained token has a row at each TTT step: its own and those just before its sample's answer.
        rows = [tokens + (self.config.ttt_steps - 1) * samples for tokens, samples in packs]
        self.capacity = row_capacity(rows, self.config.total_seq_len)

    def examples(self) -> list[PackedBatch]:
        num_tokens, width = self.config.total_seq_len, self.model.hidden_size
        aux_width = self.model.fc.weight.shape[1]
        draw = torch.Generator().manual_seed(0)
        aux = torch.randn(num_tokens, aux_width, generator=draw).bfloat16()
        last = torch.randn(num_tokens, width, generator=draw).bfloat16()
        places = torch.arange(num_tokens)
        return [
            PackedBatch(aux, places * 0, places >= num_tokens - num_rows, places + 1, last, (num_tokens,))
            for num_rows in {num_tokens, min(num_tokens, (self.capacity or num_tokens) // 2)}
        ]

    def forward(self, pack: PreparedPack, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        run = {"rows": self._forward_rows, "packed": self._forward_packed, "library": self._forward_library}
        return run[self.implementation](pack, num_loss_tokens)

    def _forward_rows(self, pack: PreparedPack, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        plan = plan_rows(pack.batch, self.config.ttt_steps)
        weights = self._row_weights(plan.valid, num_loss_tokens)
        return self._summed(forward_rows(self.model, pack.batch, plan, weights), num_loss_tokens)

    def _forward_packed(self, pack: PreparedPack, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        assert pack.plan is not None
        weights = self._row_weights(pack.plan.valid, num_loss_tokens)
        batch = pack.batch.padded_to(pack.plan.num_tokens)
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return self._summed(self.packed(self.model, batch, pack.plan, weights), num_loss_tokens)

    def _row_weights(self, valid: Tensor, num_loss_tokens: int) -> list[Tensor]:
        decay = self.config.ttt_step_loss_decay
        return [valid[step].float() * (decay**step / num_loss_tokens) for step in range(self.config.ttt_steps)]

    def _summed(self, steps: list[StepSums], num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        counts = count_guesses([step.valid for step in steps], [step.correct for step in steps])
        weights = [self.config.ttt_step_loss_decay**index / num_loss_tokens for index in range(len(steps))]
        losses = [step.loss.detach() / weight for step, weight in zip(steps, weights, strict=True)]
        rows = torch.stack([step.valid.sum() for step in steps])
        table = torch.stack([torch.stack(losses).double(), rows.double(), *counts.double()], dim=1)
        return torch.stack([step.loss for step in steps]).sum(), table

    def _forward_library(self, pack: PreparedPack, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        from speculators.losses import resolve_loss_config

        assert pack.documents is not None
        assert pack.valid is not None
        config = self.config
        batch = pack.batch.padded_to(config.total_seq_len)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        last_hidden = batch.verifier_last_hidden_states.to(dtype)
        guesses, loss, metrics = self.model(
            batch.hidden_states.to(dtype)[None],
            batch.input_ids[None],
            pack.documents[None],
            loss_mask=batch.loss_mask[None],
            position_ids=batch.position_ids[None],
            verifier_last_hidden_states=last_hidden[None],
            ttt_steps=config.ttt_steps,
            ttt_step_loss_decay=config.ttt_step_loss_decay,
            loss_config=resolve_loss_config(config.loss, "eager"),
        )
        # Its own accuracies sum over other rows than they count (rows without a target are in `cond_acc_total`,
        # rows that no draft starts from in `full_acc_total`): a draft that is right everywhere would not score 1.
        with torch.no_grad():
            wanted = self.model.verifier_lm_head(self.model.verifier_norm(last_hidden)).argmax(dim=-1)
            # The row's target at TTT step s is s rows further on; where there is none, it is not valid either.
            correct = [guess[0] == wanted.roll(-step) for step, guess in enumerate(guesses)]
            counts = count_guesses(list(pack.valid), correct).double()
        decay = config.ttt_step_loss_decay
        means = [metrics[f"loss_{step}_sum"] / decay**step for step in range(config.ttt_steps)]
        rows = torch.full_like(counts[0], pack.num_loss_tokens)
        table = torch.stack([torch.stack(means).double() * rows, rows, *counts], dim=1)
        return loss * (pack.num_loss_tokens / num_loss_tokens), table


def count_guesses(valid: Sequence[Tensor], correct: Sequence[Tensor]) -> Tensor:
    """The counts `correct`, `total` and `judged` of SUM_COLUMNS.

    Args:
        valid, correct: for each TTT step [num_rows], whether a row has a target there, and whether its guess is
            that; what `correct` says of a row without a target does not matter.

    Returns:
        [3, ttt_steps].
    """
    judged = standing = torch.ones_like(valid[0])
    columns = []
    for has_target, guessed in zip(valid, correct, strict=True):
        judged = judged & has_target
        eligible = standing & has_target
        standing = eligible & guessed
        columns.append(torch.stack([standing.sum(), eligible.sum(), judged.sum()]))
    return torch.stack(columns, dim=1)


def _implementation(model: Any, config: TrainConfig, wanted: str) -> str:
    """`wanted`, or `library` where that cannot compute this draft or loss."""
    problem = None
    if wanted != "library" and config.loss != "kl_div":
        problem = f"it is written for kl_div, not {config.loss}"
    elif wanted == "packed":
        problem = unsupported(model)
    if problem is None:
        return wanted
    logger.info("The %s forward pass is not taken: %s. speculators' own is.", wanted, problem)
    return "library"
