"""How many nodes work on one run, and what one of them costs. None of it changes what is written."""

from __future__ import annotations

from pydantic import Field

from infra.config import Config


class NodesConfig(Config):
    """The nodes of a run: the one that the pipeline runs on, and those that help it."""

    count: int = Field(default=1, ge=1)
    """Most nodes that share the missing shards of generation and of extraction, each with servers or engines of its
    own: the run's own node, and a partition run for each other one. However few of them come, the work is done."""
    deployment: str = Field(default="partition/partition", pattern=r"^[^/]+/[^/]+$")
    """Deployment of the partition runs, as flow/deployment; its work pool says on which nodes they run."""
    price_per_hour: float | None = Field(default=None, ge=0.0)
    """Price of one node for an hour, for the costs that `draftsmith plan` shows."""
    currency: str = Field(default="USD", min_length=1)
    """Of that price."""
