"""The checkpoint of the best evaluated step, and the log of evaluations.

Invariant: a new loss is compared with the loss of the existing checkpoint. So a crash
  can miss a better step, but it never leads to keeping a worse one.
"""

import json
import math
from pathlib import Path

from jaxinf.engine import Store
from jaxinf.train.evaluate import Evaluation

BEST = "best"
HELD_OUT = ("loss", "perplexity", "accuracy")


def best_loss(store: Store | None, log: Path) -> float:
    """Returns the loss of the checkpoint named best, or infinity if it is not known.

    Args:
      store: the run's; None in memory.
      log: `validation.jsonl`, with the loss of each evaluated step.
    """
    held = store.checkpoints() if store is not None and store.exists else []
    steps = [one.step for one in held if one.name == BEST]
    if not steps or not log.exists():
        return math.inf
    entries = map(json.loads, log.read_text().splitlines())
    losses = (float(e["loss"]) for e in entries if e.get("committed") == steps[0])
    return next(losses, math.inf)


def evaluation_line(step: int, committed: int, found: Evaluation) -> str:
    """Makes a line of `validation.jsonl`.

    Args:
      committed: number of the commit; less than `step` if batches were skipped.
    """
    fields = {name: getattr(found, name) for name in HELD_OUT}
    return json.dumps({"step": step, "committed": committed, **fields})
