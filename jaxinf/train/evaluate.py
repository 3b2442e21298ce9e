"""How good the model is: validation loss against byte statistics, and a sample.

Invariant: the cost is bounded whatever the model's size, and the result is a pure
function of params, text and seed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxinf_models import generate, loss, num_params

from jaxinf.train.config import TrainConfig
from jaxinf.train.data import ByteCorpus
from jaxinf.train.entropy import bigram_entropy, unigram_entropy
from jaxinf.typing import PyTree

__all__ = ["Evaluator", "Verdict", "batch"]

# Params x tokens: nano evaluates 64 batches of 512, some 2 s on two cores.
_LOSS_BUDGET = 3e10
_MIN_BATCHES, _MAX_BATCHES = 4, 64
# Params x tokens of context x tokens: nano samples its 200 in some 2 s.
_SAMPLE_BUDGET = 1.2e11
_SAMPLE_BYTES = 200
_MIN_SAMPLE_BYTES = 8
_PROMPT_BYTES = 32
_TEMPERATURE = 0.8  # below 1: a small model's rare bytes are mostly noise


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Validation loss and what byte statistics alone would reach, all in nats a byte.

    Attributes:
      loss: the model's.
      unigram: entropy of the text's bytes.
      bigram: entropy of a byte given the one before it.
    """

    loss: float
    unigram: float
    bigram: float


class Evaluator:
    """Evaluates params of one model on one corpus."""

    def __init__(self, config: TrainConfig, corpus: ByteCorpus, graphdef: Any) -> None:
        self._config, self._corpus, self._graphdef = config, corpus, graphdef

    def validation_loss(self, params: PyTree) -> float:
        """Mean over the same validation windows at every call."""
        config = self._config
        tokens_a_batch = config.batch_size * config.seq_len
        fitting = _LOSS_BUDGET / num_params(config.model_config) / tokens_a_batch
        num_batches = int(min(max(fitting, _MIN_BATCHES), _MAX_BATCHES))
        losses = [
            _loss(
                self._graphdef,
                params,
                *batch(config, self._corpus, number, "validation"),
            )
            for number in range(num_batches)
        ]
        return float(np.mean([float(value) for value in losses]))

    def verdict(self, loss: float) -> Verdict:
        """A validation loss beside the entropies of the validation text."""
        text = self._corpus.validation
        return Verdict(loss, unigram_entropy(text), bigram_entropy(text))

    def sample(self, params: PyTree) -> tuple[bytes, bytes]:
        """A prompt from the validation text and the model's continuation."""
        config = self._config
        num_bytes = config.sample_bytes
        if num_bytes is None:
            cost = num_params(config.model_config) * config.seq_len
            fitting = max(_SAMPLE_BUDGET / cost, _MIN_SAMPLE_BYTES)
            num_bytes = int(min(fitting, _SAMPLE_BYTES))
        if not num_bytes:
            return b"", b""
        prompt = self._corpus.validation[: min(_PROMPT_BYTES, config.seq_len)]
        tokens = generate(
            nnx.merge(self._graphdef, params),
            jnp.asarray(prompt, jnp.int32)[None],
            num_bytes,
            key=jax.random.key(config.seed),
            temperature=_TEMPERATURE,
            max_context=config.seq_len,
        )
        # A vocabulary of 50257 has tokens that are no byte; an untrained model's own.
        text = bytes(min(int(token), 0xFF) for token in np.asarray(tokens[0]))
        return prompt.tobytes(), text


@functools.partial(jax.jit, static_argnums=0)
def _loss(
    graphdef: Any, params: PyTree, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    return loss(nnx.merge(graphdef, params), tokens, targets)


def batch(config: TrainConfig, corpus: ByteCorpus, step: int, split: Any) -> Any:
    """Batch number `step` of a split, in the config's shape and from its seed."""
    return corpus.batch(
        step,
        config.seed,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        split=split,
    )
