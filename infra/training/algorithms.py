"""The kinds of draft that can be trained, by the name that a config gives them."""

from __future__ import annotations

from infra.training.algorithm import Algorithm
from infra.training.config import TrainConfig


def algorithm(config: TrainConfig) -> Algorithm:
    """The algorithm that the config names."""
    from infra.training.eagle3 import Eagle3  # torch's compiler comes with it: a second

    return {"eagle3": Eagle3()}[config.algorithm]
