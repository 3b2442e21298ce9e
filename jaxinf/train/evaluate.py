"""Evaluation on held-out data, its log, and the best step so far.

Invariant: the cost is bounded for any model size, and the result is a pure function of
params, data and seed. A new loss is compared with the loss of the existing checkpoint,
which each later commit has, so none is replaced by a worse one.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxinf_models import Scores, num_params, score

from jaxinf.engine import Store
from jaxinf.processes import Group
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch, one_epoch
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.lora import model_of
from jaxinf.typing import PyTree

BEST = "best"

# Params x tokens: nano evaluates 64 batches of 512, some 2 s on two cores.
_LOSS_BUDGET = 3e10
_MIN_BATCHES, _MAX_BATCHES = 4, 64


class Evaluation(NamedTuple):
    """Means over the held-out data.

    Attributes:
      loss: cross entropy in nats per token or label.
      accuracy: share of tokens or labels that the model ranked first.
    """

    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class Best(NamedTuple):
    """The checkpoint named best."""

    step: int = -1
    loss: float = math.inf

    def payload(self) -> dict[str, Any]:
        """Returns its part of a commit's payload."""
        return {"best": self._asdict()} if self.step >= 0 else {}


def best_of(store: Store | None, group: Group) -> Best:
    """Returns the checkpoint named best, with its loss as the last commit has it.

    None counts of which the commit says nothing: the first evaluation replaces it. Nor
    does one of a step that the run has left, as by a restore, or if processes of the
    group differ, of which some had replaced theirs when they were killed.
    """
    if store is None or not store.exists:
        return Best()
    steps = [one.step for one in store.checkpoints() if one.name == BEST]
    said = store.payload.get("best") if isinstance(store.payload, Mapping) else None
    own, said = Best(), said if isinstance(said, Mapping) else {}
    step, loss = said.get("step"), said.get("loss")
    if isinstance(loss, int | float) and abs(loss) <= sys.float_info.max:
        own = Best(steps[0], float(loss)) if steps == [step] else own
    found = group.gather("the best checkpoint", lambda: own)
    return own if {Best(*one) for one in found} == {own} else Best()


def evaluator(
    config: TrainConfig,
    data: TrainingData,
    function: Callable[[Callable[[PyTree, Any], Any]], Callable[..., Any]],
) -> Callable[[PyTree], Evaluation]:
    """Returns a function of params: their means over the same batches in every call.

    Args:
      function: makes a function of params and inputs that is compiled when it is
        called.
    """
    (graphdef, _), alpha = config.abstract, config.lora_alpha

    def scores(params: PyTree, batch: Any) -> Scores:
        return score(model_of(graphdef, params, alpha), config.task_name, batch)

    scored, how = function(scores), {"seed": config.seed, "row_map": data.row_map}
    batches = one_epoch(data.validation, batch_size=config.batch_size, **how)
    size = num_params(config.model_config) * num_tokens(batches[0])
    fitting = min(max(_LOSS_BUDGET / size, _MIN_BATCHES), _MAX_BATCHES)
    numbers = range(min(int(fitting), len(batches)))

    def evaluate(params: PyTree) -> Evaluation:
        found = [np.array(scored(params, batches[n]), np.float64) for n in numbers]
        loss, weight, correct = np.sum(found, axis=0)
        return Evaluation(float(loss / weight), float(correct / weight))

    return evaluate


def num_tokens(batch: Batch) -> int:
    """Counts the tokens of a batch with padding, or its images."""
    names = [name for name in ("tokens", "decoder_tokens") if name in batch]
    return sum(batch[name].size for name in names) or len(batch["labels"])
