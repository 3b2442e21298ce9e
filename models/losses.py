"""What a task asks of a model: how wrong it is on a batch, and how often right.

Invariant: means are over what counts: each token or label has the same weight, whatever
the batch it is in, and tokens of weight 0 leave loss and gradients alone.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .layers import Key, Remat, output_logits

__all__ = ["BATCH_FIELDS", "Batch", "Scores", "TaskName", "loss", "score", "task_loss"]

TaskName: TypeAlias = Literal["causal-lm", "masked-lm", "seq2seq", "classification"]
Batch: TypeAlias = Mapping[str, jax.Array]

BATCH_FIELDS: Mapping[TaskName, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "causal-lm": (("tokens", "targets"), ("weights", "segments")),
    "masked-lm": (("tokens", "targets", "weights"), ("segments", "token_types")),
    "seq2seq": (
        ("tokens", "decoder_tokens", "targets"),
        ("weights", "segments", "decoder_segments"),
    ),
    "classification": (("labels",), ("tokens", "images", "segments", "token_types")),
}
"""For each task the fields that a batch must have and those that it may have.

tokens, targets, token_types: int [batch, seq]. targets are the tokens that should be
    predicted *at* each place: for causal-lm the one after, for masked-lm the one there.
weights: float or bool [batch, seq], of each target; 0 leaves it out. All 1 by default.
segments: int [batch, seq]: the document of its row that a token is of, 0 for padding;
    documents do not see each other. One document by default.
decoder_tokens, decoder_segments: the same, int [batch, targets], of what a seq2seq
    model is given of its answer: the targets, one later.
images: float [batch, height, width, channels]. labels: int [batch].
"""

MAX_LOGITS_BYTES = 256 << 20  # fp32 logits that are held at once


class Scores(NamedTuple):
    """Sums over a batch, each a float32 scalar; batches add up.

    Attributes:
      loss: weighted cross entropies, in nats.
      weight: what to divide the other two by.
      correct: weights of the targets that were the likeliest.
    """

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array


def task_loss(
    model: Any,
    task: TaskName,
    batch: Batch,
    *,
    key: Key = None,
    remat: Remat = None,
) -> jax.Array:
    """Mean cross entropy of a batch in nats, a float32 scalar; to be differentiated.

    Args:
      model: one that has the task.
      task: what to do.
      batch: arrays by name, as in `BATCH_FIELDS`.
      key: for dropout; None, as for evaluation: no dropout.
      remat: what wraps each layer's function, such as `jax.checkpoint`.
    """
    sums = score(model, task, batch, key=key, remat=remat)
    return sums.loss / sums.weight


def score(
    model: Any,
    task: TaskName,
    batch: Batch,
    *,
    key: Key = None,
    remat: Remat = None,
) -> Scores:
    """Like `task_loss`, in sums that add up over batches, and with accuracy."""
    inputs = {
        name: batch[name]
        for field in BATCH_FIELDS[task]
        for name in field
        if name in batch and name not in ("targets", "weights", "labels")
    }
    if task == "classification":
        logits = model(**inputs, key=key, remat=remat)
        weights = jnp.ones(batch["labels"].shape, jnp.float32)
        return _scores(logits, batch["labels"], weights)
    x = model.hidden(**inputs, key=key, remat=remat)
    return _token_scores(x, batch["targets"], batch.get("weights"), *model.output())


def loss(model: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """`task_loss` of a causal language model: int [batch, seq] both."""
    return task_loss(model, "causal-lm", {"tokens": tokens, "targets": targets})


def _token_scores(
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    table: jax.Array,
    bias: jax.Array | None,
) -> Scores:
    """Scores of [batch, seq, features] against int [batch, seq].

    Where the logits would be large (vocabulary 50257), they are computed for a slice of
    the sequence at a time and again in the backward pass, never kept whole.
    """
    # fp32, so that the gradients of the slices add up in fp32.
    table = table.astype(jnp.float32)
    num_slices = _num_slices(targets.shape[1], targets.size * table.shape[0] * 4)

    def scores_of(x: jax.Array, targets: jax.Array, weights: Any) -> Scores:
        return _scores(output_logits(x, table, bias), targets, weights)

    weights = None if weights is None else weights.astype(jnp.float32)
    if num_slices == 1:
        return scores_of(x, targets, weights)

    def sliced(a: jax.Array | None) -> jax.Array | None:
        if a is None:
            return None
        return jnp.stack(jnp.split(a, num_slices, axis=1))

    @jax.checkpoint
    def add(total: Scores, part: Any) -> tuple[Scores, None]:
        return jax.tree.map(jnp.add, total, scores_of(*part)), None

    parts = (sliced(x), sliced(targets), sliced(weights))
    total, _ = jax.lax.scan(add, Scores(*[jnp.float32(0)] * 3), parts)
    return total


def _num_slices(seq: int, logits_bytes: int) -> int:
    """Fewest equal slices of the sequence whose logits fit in MAX_LOGITS_BYTES."""
    fewest = max(1, math.ceil(logits_bytes / MAX_LOGITS_BYTES))
    return next((n for n in range(fewest, seq) if seq % n == 0), seq)


def _scores(logits: jax.Array, targets: jax.Array, weights: Any) -> Scores:
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    is_right = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    if weights is None:
        return Scores(jnp.sum(losses), jnp.float32(targets.size), jnp.sum(is_right))
    return Scores(
        jnp.sum(losses * weights), jnp.sum(weights), jnp.sum(is_right * weights)
    )
