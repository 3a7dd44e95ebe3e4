"""Checks that a sample's hidden states must pass before they count: each refuses by its own name.

- `ids`, `length`: the states are of these tokens, of all of them (infra/extraction/engine.py)
- `not finite`, `all zero`, `constant`: no model computed this (`states_problem`)
- `norms`: a layer's states are as long as in the stage's other samples (infra/state_checks/norms.py)
- `off-policy`: the verifier's own head predicts the completion from them (infra/state_checks/on_policy.py)

    checks = StateChecks(config.checks, meta, open_head(config.checks, verifier))   # once a stage
    checks.learn(record.extra for record in records)                                # of a resumed stage
    built = build_shard(responses, results, meta, checks)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from infra.errors import InputError
from infra.hidden_states import HiddenStatesMeta
from infra.state_checks import norms as state_norms
from infra.state_checks import on_policy
from infra.state_checks.norms import Floats, LayerNorms, NormsCheck, NormsConfig
from infra.state_checks.on_policy import Excerpt, OnPolicy, OnPolicyConfig
from infra.state_checks.verifier_head import UnknownHead, VerifierHead
from infra.verifiers.verifier import Verifier

logger = logging.getLogger("draftsmith.extraction")


class ChecksConfig(OnPolicyConfig, NormsConfig):
    """What a sample's hidden states must pass before they count."""


def open_head(config: ChecksConfig, verifier: Verifier) -> VerifierHead | None:
    """The verifier's head for the on-policy check; None where that is off.

    Raises:
        InputError: the check is required, and the checkpoint's head is of no layout that is known.
    """
    if config.on_policy == "off":
        return None
    try:
        return VerifierHead.open(verifier.path)
    except UnknownHead as error:
        if config.on_policy == "required":
            raise InputError(
                "extract.checks.on_policy", f"cannot be required of {verifier.name}: {error}"
            ) from error
        logger.warning(
            "The on-policy check is off, so nothing will tell responses of another model from this one's: the head "
            "of %s cannot be used, since %s.",
            verifier.name,
            error,
        )
        return None


class StateChecks:
    """The checks of one stage. Thread-safe: several shards are built at once.

    Args:
        meta: of the shards to be checked.
        head: None turns the on-policy check off (`open_head`).
    """

    def __init__(self, config: ChecksConfig, meta: HiddenStatesMeta, head: VerifierHead | None) -> None:
        self.config = config
        self.meta = meta
        self.head = head
        self.norms = NormsCheck(config, meta.layer_ids)

    def learn(self, extras: Iterable[Mapping[str, Any]]) -> None:
        """Take the norms of shards made earlier into the stage's statistics, from their records' `extra`."""
        for extra in extras:
            if layer_norms := extra.get("layer_norms"):
                self.norms.learn(LayerNorms.from_json(layer_norms))

    def shard(self) -> ShardChecks:
        """The checks of one shard, for one thread."""
        return ShardChecks(self)


class ShardChecks:
    """Judges the samples of one shard, and keeps what its record says of those that passed.

    The verifier's head is asked about all samples at once, when they are through: for each by itself it would have
    to be read from memory each time. Until then a few states of each are kept.
    """

    def __init__(self, stage: StateChecks) -> None:
        self._stage = stage
        self._known = stage.norms.known()
        self._norms: dict[str, Floats | None] = {}
        self._excerpts: dict[str, Excerpt] = {}
        self._on_policy = OnPolicy()

    def problem(self, response: Mapping[str, Any], states: Tensor) -> str | None:
        """Why a sample is refused at once, beginning with the name of the check; None if it is not (yet).

        Args:
            response: a row of `schemas.RESPONSES`: its sample_id, input_ids, loss_mask and temperature.
            states: [tokens, layers, hidden], which passed `states_problem`.
        """
        sample_id, ids = response["sample_id"], response["input_ids"]
        norms = state_norms.log_norms(states, ids)
        if self._known and (problem := self._stage.norms.problem(norms, self._known)):
            return problem
        if head := self._stage.head:
            if max(ids) >= head.vocab_size:
                return f"ids: token id {max(ids)} is not among the {head.vocab_size} of the verifier"
            self._excerpts[sample_id] = Excerpt.of(
                *(states[:, -1], ids, response["loss_mask"], response["temperature"]),
                seed=sample_id,
                config=self._stage.config,
            )
        self._norms[sample_id] = norms
        return None

    def late_problems(self) -> dict[str, str]:
        """Samples that are refused after all, now that all are through, by id.

        A stage's first shards by their norms, which had nothing to compare with; then by the verifier's head.
        """
        refused: dict[str, str] = {}
        if not self._known and (own := self._own_norms()):
            found = {name: self._stage.norms.problem(norms, own) for name, norms in self._norms.items()}
            refused |= {name: problem for name, problem in found.items() if problem}
        if head := self._stage.head:
            config = self._stage.config
            excerpts = {name: excerpt for name, excerpt in self._excerpts.items() if name not in refused}
            for name, look in zip(excerpts, on_policy.measure(head, [*excerpts.values()], config), strict=True):
                if problem := on_policy.problem(look, config):
                    refused[name] = problem
                else:
                    self._on_policy += look
        for name in refused:
            del self._norms[name]
        return refused

    def close(self) -> dict[str, Any]:
        """`layer_norms` and `on_policy` for the shard's record, where there are any.

        Effects: the stage learns the norms.
        """
        extra: dict[str, Any] = {}
        if own := self._own_norms():
            self._stage.norms.learn(own)
            extra["layer_norms"] = own.to_json()
        if self._on_policy.positions:
            extra["on_policy"] = self._on_policy.to_json()
        return extra

    def _own_norms(self) -> LayerNorms | None:
        measured = [norms for norms in self._norms.values() if norms is not None]
        return LayerNorms.of(measured) if measured else None


def states_problem(states: Tensor, input_ids: Sequence[int], layer_ids: Sequence[int]) -> str | None:
    """Why these states cannot be what a model computed, the check's name first; None if they can.

    Hybrid verifiers have given all-zero, constant, NaN and Inf states, on which training "converges" to an
    acceptance of 0 (vllm#46301, speculators#613). Reads the states once, at 2 GB/s a core.

    Args:
        states: [tokens, layers, hidden].
        input_ids: the tokens they belong to.
        layer_ids: of the second dimension, for the message.
    """
    if states.shape[0] != len(input_ids) or states.shape[1] != len(layer_ids):
        return (
            f"length: states of shape {list(states.shape)} for {len(input_ids)} tokens and {len(layer_ids)} layers"
        )
    high, low = states.amax(dim=-1), states.amin(dim=-1)  # [tokens, layers]; NaN where any value is
    for problem, where in (
        ("not finite", ~(high.isfinite() & low.isfinite())),
        ("all zero", (high == 0) & (low == 0)),
        ("constant", high == low),
    ):
        if bool(where.any()):
            token, layer = where.nonzero()[0].tolist()
            count = int(where.any(dim=1).sum())
            return f"{problem}: layer {layer_ids[layer]}, token {token} ({count} of {len(input_ids)} tokens)"
    # The same token over and over rightly gives the same state over and over.
    if len(set(input_ids)) > 1:
        for layer in ((high == high[0]) & (low == low[0])).all(dim=0).nonzero().flatten().tolist():
            if bool((states[:, layer] == states[0, layer]).all()):
                return f"constant: the same at every token of layer {layer_ids[layer]}"
    return None
