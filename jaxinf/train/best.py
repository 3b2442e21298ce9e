"""The checkpoint named best: the step of the lowest validation loss so far.

Invariant: what counts as the best so far is the loss of the checkpoint that is there,
so that a crash can make it miss a step but never keep a worse one.
"""

import json
import math
from pathlib import Path
from typing import Any

from jaxinf.train.backend import Backend
from jaxinf.train.evaluate import Evaluation

__all__ = ["BEST", "Best", "evaluation_line"]

BEST = "best"


class Best:
    """Keeps the checkpoint.

    Args:
      backend: whose checkpoints they are.
      log: `validation.jsonl`, which says what loss each step had.
    """

    def __init__(self, backend: Backend, log: Path) -> None:
        self._backend = backend
        committed = backend.checkpoint_steps().get(BEST)
        self.loss = _logged_loss(log, committed)

    def offer(self, state: Any, loss: float) -> bool:
        """Keeps the step of a state if it is the best so far; says whether it is."""
        if not loss < self.loss:
            return False
        if not self._backend.replace_checkpoint(state, BEST):
            return False
        self.loss = loss
        return True


def evaluation_line(step: int, committed: int, found: Evaluation) -> str:
    """A line of `validation.jsonl`.

    Args:
      step: batches trained on.
      committed: number of the commit, which is less where batches were skipped.
      found: what the evaluation found.
    """
    return json.dumps(
        {
            "step": step,
            "committed": committed,
            "loss": found.loss,
            "perplexity": found.perplexity,
            "accuracy": found.accuracy,
        }
    )


def _logged_loss(log: Path, committed: int | None) -> float:
    """The loss of a committed step; infinite where it is not known."""
    if committed is None or not log.exists():
        return math.inf
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("committed") == committed:
            return float(entry["loss"])
    return math.inf
