"""The checkpoint named best: the step of the lowest validation loss so far.

Invariant: a new loss is compared with the loss of the existing checkpoint. So a crash
  can miss a better step, but it never leads to keeping a worse one.
"""

import json
import math
from pathlib import Path
from typing import Any

from jaxinf.train.backend import Backend
from jaxinf.train.evaluate import Evaluation

BEST = "best"


class Best:
    """Keeps the checkpoint named best.

    Args:
      log: `validation.jsonl`, with the loss of each evaluated step.
    """

    def __init__(self, backend: Backend, log: Path) -> None:
        self._backend = backend
        committed = backend.checkpoint_steps().get(BEST)
        self.loss = _logged_loss(log, committed)

    def offer(self, state: Any, loss: float) -> bool:
        """Keeps the step of a state if it is the best so far; returns whether it is."""
        if not loss < self.loss:
            return False
        if not self._backend.replace_checkpoint(state, BEST):
            return False
        self.loss = loss
        return True


def evaluation_line(step: int, committed: int, found: Evaluation) -> str:
    """Makes a line of `validation.jsonl`.

    Args:
      committed: number of the commit; less than `step` if batches were skipped.
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
    """Returns the loss of a committed step, or infinity if it is not known."""
    if committed is None or not log.exists():
        return math.inf
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("committed") == committed:
            return float(entry["loss"])
    return math.inf
