"""Which validation was the best so far, and whether they have stopped getting better.

Both follow from the validations alone, whose sums are the same on every rank, and are part of every checkpoint's
state: all ranks, and a run that is resumed, come to the same best and end after the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infra.errors import InputError
from infra.training.checkpoint_files import CheckpointRef
from infra.training.config import TrainConfig


@dataclass(frozen=True)
class Validations:
    """What the validations up to some step say. Lengths are predicted acceptance lengths; 0 before the first one.

    Args:
        num: how many there were.
        best: checkpoint of the step with the greatest length, the first of several.
        best_length: that length.
        gained_length: length at the last gain, which the next one must exceed by more than `early_stop_min_gain`.
        num_without_gain: validations since then.
    """

    num: int = 0
    best: CheckpointRef | None = None
    best_length: float = 0.0
    gained_length: float = 0.0
    num_without_gain: int = 0

    def after(self, length: float, ref: CheckpointRef, min_gain: float) -> Validations:
        """The same with one more, made at the step of `ref`."""
        better = length > self.best_length
        gain = self.num == 0 or length > self.gained_length + min_gain
        return Validations(
            num=self.num + 1,
            best=ref if better else self.best,
            best_length=length if better else self.best_length,
            gained_length=length if gain else self.gained_length,
            num_without_gain=0 if gain else self.num_without_gain + 1,
        )

    def plateau(self, config: TrainConfig) -> bool:
        """Whether training ends here."""
        patience = config.early_stop_patience
        return patience is not None and self.num_without_gain >= patience

    def to_json(self) -> dict[str, Any]:
        # Hexadecimal floats come back bit for bit.
        lengths = {name: getattr(self, name).hex() for name in ("best_length", "gained_length")}
        return {**asdict(self), **lengths}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Validations:
        best = value["best"]
        lengths = {name: float.fromhex(value[name]) for name in ("best_length", "gained_length")}
        return cls(**{**value, **lengths, "best": None if best is None else CheckpointRef(**best)})


def why_exported(state: Mapping[str, Any], config: TrainConfig) -> str:
    """Why the export is of the step it is of, in words.

    Args:
        state: of the checkpoint after which training ended.
    """
    said = Validations.from_json(state["validations"]) if "validations" in state else Validations()
    if config.export_checkpoint == "best":
        return (
            f"its predicted acceptance length on validation data, {said.best_length:.4f}, is the highest of "
            f"{said.num} validations"
        )
    if state["step"] < state["num_steps"]:
        return f"training ended there: {ended_early(said, config)}"
    return "it is the last"


def ended_early(said: Validations, config: TrainConfig) -> str:
    return (
        f"{said.num_without_gain} validations in a row have not brought the predicted acceptance length more than "
        f"{config.early_stop_min_gain:g} above {said.gained_length:.4f}"
    )


def refuse_without_validation(config: TrainConfig, num_samples: int, any_validation: bool) -> None:
    """Raise InputError where validations decide and none of the samples is for validation."""
    if config.validations_decide and not any_validation:
        raise InputError(
            "train.validation_share",
            f"{config.validation_share:g} of {num_samples} samples is none, but validation samples decide what is "
            "exported (export_checkpoint, early_stop_patience); raise it",
        )
