"""Evaluation on held-out data, and the best step so far.

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
from jaxinf.train.data.loader import Batch, epoch_batches
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.lora import merge_model
from jaxinf.typing import PyTree

BEST = "best"

# Params x tokens: nano evaluates 64 batches of 512, some 2 s on two cores.
_LOSS_BUDGET = 3e10
_MIN_BATCHES, _MAX_BATCHES = 4, 64


class Evaluation(NamedTuple):
    """Means over held-out tokens or labels: nats, and the share ranked first."""

    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class BestCheckpoint(NamedTuple):
    step: int = -1
    loss: float = math.inf

    def to_payload(self) -> dict[str, Any]:
        return {"best": self._asdict()} if self.step >= 0 else {}


def find_best(store: Store | None, group: Group) -> BestCheckpoint:
    """Returns the checkpoint named best, with its loss as the last commit has it.

    A checkpoint that the commit does not mention does not count: the first evaluation
    replaces it. Neither does one of a step that the run has left, as by a restore, nor
    one that only some processes have, as when they were killed while replacing it.
    """
    if store is None or not store.exists:
        return BestCheckpoint()
    steps = [info.step for info in store.checkpoints() if info.name == BEST]
    payload = store.payload if isinstance(store.payload, Mapping) else {}
    record = payload.get("best")
    best, record = BestCheckpoint(), record if isinstance(record, Mapping) else {}
    step, loss = record.get("step"), record.get("loss")
    if isinstance(loss, int | float) and abs(loss) <= sys.float_info.max:
        best = BestCheckpoint(steps[0], float(loss)) if steps == [step] else best
    gathered = group.gather("the best checkpoint", lambda: best)
    is_same = {BestCheckpoint(*fields) for fields in gathered} == {best}
    return best if is_same else BestCheckpoint()


def make_evaluator(
    config: TrainConfig,
    data: TrainingData,
    compile_function: Callable[[Callable[[PyTree, Any], Any]], Callable[..., Any]],
) -> Callable[[PyTree], Evaluation]:
    """Returns a function of params: their means over the same batches in every call."""
    (graphdef, _), alpha = config.abstract, config.lora_alpha

    def scores(params: PyTree, batch: Any) -> Scores:
        return score(merge_model(graphdef, params, alpha), config.task_name, batch)

    compiled = compile_function(scores)
    options: Any = {"seed": config.seed, "row_map": data.row_map}
    batches = epoch_batches(data.validation, batch_size=config.batch_size, **options)
    cost = num_params(config.model_config) * count_tokens(batches[0])
    num_batches = min(max(_LOSS_BUDGET / cost, _MIN_BATCHES), _MAX_BATCHES)
    numbers = range(min(int(num_batches), len(batches)))

    def evaluate(params: PyTree) -> Evaluation:
        sums = [np.array(compiled(params, batches[n]), np.float64) for n in numbers]
        loss, weight, correct = np.sum(sums, axis=0)
        return Evaluation(float(loss / weight), float(correct / weight))

    return evaluate


def count_tokens(batch: Batch) -> int:
    """Counts the tokens of a batch with padding, or its images."""
    names = [name for name in ("tokens", "decoder_tokens") if name in batch]
    return sum(batch[name].size for name in names) or len(batch["labels"])
