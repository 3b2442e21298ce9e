"""Each task's loss and accuracy of a model on a batch.

Invariant: each token or label has the same weight in a mean, whichever batch it is in,
and tokens of weight 0 affect neither loss nor gradients.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .layers import Key, Remat, output_logits

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
"""The required and the optional fields of a batch, by task.

tokens, targets, token_types: int [batch, seq]. A target is the token to be predicted at
    a position: for causal-lm the next token, for masked-lm the one at the position.
weights: float or bool [batch, seq], weights of the targets; 1 by default.
segments: int [batch, seq], the number of each token's document in its row, 0 for
    padding; documents do not see each other. By default a row is one document.
decoder_tokens, decoder_segments: int [batch, targets], tokens and segments of a seq2seq
    model's decoder: the targets shifted by one.
images: float [batch, height, width, channels]. labels: int [batch].
"""

MAX_LOGITS_BYTES = 256 << 20  # fp32 logits in memory at once


class Scores(NamedTuple):
    """Sums over a batch, each a float32 scalar; batches add up.

    Attributes:
      loss: weighted cross entropies, in nats.
      weight: sum of the weights, by which the other two are divided.
      correct: sum of the weights of targets to which the model gave the highest score.
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
      model: a model that has the task.
      batch: arrays by name, as in `BATCH_FIELDS`.
      key: key of the dropout; None for no dropout, as in evaluation.
      remat: wrapper of each layer's function, such as `jax.checkpoint`.
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

    Large logits (vocabulary 50257) are never all in memory: they are computed for one
    slice of the sequence at a time, and again in the backward pass.
    """
    # fp32, so that the gradients of the slices add up in fp32.
    table = table.astype(jnp.float32)
    num_slices = _num_slices(targets.shape[1], targets.size * table.shape[0] * 4)

    def scores_of(x: jax.Array, targets: jax.Array, weights: Any) -> Scores:
        return _scores(output_logits(x, table, bias), targets, weights)

    weights = None if weights is None else weights.astype(jnp.float32)
    if num_slices == 1:
        return scores_of(x, targets, weights)

    def slices(a: jax.Array) -> jax.Array:
        return jnp.stack(jnp.split(a, num_slices, axis=1))

    @jax.checkpoint
    def add(total: Scores, part: Any) -> tuple[Scores, None]:
        return jax.tree.map(jnp.add, total, scores_of(*part)), None

    parts = jax.tree.map(slices, (x, targets, weights))
    total, _ = jax.lax.scan(add, Scores(*[jnp.float32(0)] * 3), parts)
    return total


def _num_slices(seq: int, logits_bytes: int) -> int:
    """Returns the fewest equal slices whose logits fit in MAX_LOGITS_BYTES."""
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
