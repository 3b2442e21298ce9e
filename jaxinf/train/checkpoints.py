"""Checkpoints of a run: every so many steps, and the one named best.

Invariant: a new loss is compared with the loss of the existing checkpoint. So a crash
  can miss a better step, but it never leads to keeping a worse one.
"""

import json
import math
from pathlib import Path
from typing import Any

from jaxinf.engine import Store
from jaxinf.train.evaluate import Evaluation

BEST = "best"
HELD_OUT = ("loss", "perplexity", "accuracy")


def keep_step(store: Store, state: Any, step: int, *, keep_last: int) -> str | None:
    """Keeps a step, and the `keep_last` latest ones; 0 keeps all.

    Returns:
      The checkpoint's name; None if that step is kept already.
    """
    name = str(step)
    store.wait(state)
    held = next((c for c in store.checkpoints() if c.name == name), None)
    if held is not None:
        if held.committed_at == store.committed_at:
            return None
        store.remove_checkpoint(name)  # of steps given up by a restore
    store.checkpoint(name, state=state)
    store.prune_checkpoints(keep_last=keep_last)
    return name


class Best:
    """Keeps the checkpoint named best; none without a store.

    Args:
      log: `validation.jsonl`, with the loss of each evaluated step.
    """

    def __init__(self, store: Store | None, log: Path) -> None:
        self._store = store
        self.loss = _logged_loss(log, _names(store).get(BEST))

    def offer(self, state: Any, loss: float) -> bool:
        """Keeps the step of a state if it is the best so far; returns whether it is."""
        if self._store is None or not loss < self.loss:
            return False
        self._store.wait(state)
        if BEST in _names(self._store):
            self._store.remove_checkpoint(BEST)
        self._store.checkpoint(BEST, state=state)
        self.loss = loss
        return True


def _names(store: Store | None) -> dict[str, int]:
    held = store.checkpoints() if store is not None and store.exists else []
    return {one.name: one.step for one in held}


def evaluation_line(step: int, committed: int, found: Evaluation) -> str:
    """Makes a line of `validation.jsonl`.

    Args:
      committed: number of the commit; less than `step` if batches were skipped.
    """
    fields = {name: getattr(found, name) for name in HELD_OUT}
    return json.dumps({"step": step, "committed": committed, **fields})


def _logged_loss(log: Path, committed: int | None) -> float:
    """Returns the loss of a committed step, or infinity if it is not known."""
    if committed is None or not log.exists():
        return math.inf
    entries = map(json.loads, log.read_text().splitlines())
    losses = (float(e["loss"]) for e in entries if e.get("committed") == committed)
    return next(losses, math.inf)
