"""`python -m torch.distributed.run --standalone --nproc-per-node N -m infra.training SPEC.json`

SPEC.json is a TrainSpec, its path or URI. Exit codes: 0 trained to the last step, 75 stopped by SIGTERM after a
checkpoint (run the same command to resume) or superseded by a later run, 1 failed, 2 the specification is wrong.
torchrun itself ends with 1 for any of the last four, so the last progress line says which it was
(infra.training.progress).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import NoReturn

from pydantic import ValidationError

from infra import storage
from infra.errors import DamagedShard, DraftsmithError, InputError
from infra.redaction import redact_logs
from infra.training.config import TrainSpec
from infra.training.progress import EXIT_RESUME, say


def main(arguments: list[str]) -> int:
    """Run one rank, and end the process with its exit code; returns one where there was nothing to run."""
    redact_logs()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        spec = TrainSpec.model_validate_json(storage.get(arguments[0]))
    except (OSError, ValidationError, DraftsmithError) as error:
        say("failed", error_type="InputError", message=str(error))
        return 2
    # Not above: the input processes import this module anew, and have no use for a compiler.
    from infra.training.loop import Trainer
    from infra.training.ranks import Ranks

    ranks = Ranks()
    try:
        trainer = Trainer(spec, ranks)
        outcome = trainer.run()
        if ranks.rank == 0:
            say(outcome, step=trainer.step)
        leave(0 if outcome == "done" else EXIT_RESUME)
    except DraftsmithError as error:
        more = {}
        if isinstance(error, DamagedShard):
            more = {"stage_uri": error.stage_uri, "shard": error.shard, "problem": error.problem}
        say("failed", error_type=type(error).__name__, message=str(error), **more)
        leave(2 if isinstance(error, InputError) else 1)
    except BaseException:
        traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """End the process here and now, while all that it holds is still held.

    The destructor of a gloo process group waits for a thread of its own, with Python's lock held, and that thread
    may be waiting for the lock: a rank that has trained to the last step then never ends. Nor is anything that the
    prefetching thread still holds worth waiting for.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
