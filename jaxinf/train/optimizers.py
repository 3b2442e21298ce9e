"""From a config to an optax optimizer.

Invariant: optax is the only definition of an optimizer; this module chooses and
configures, and the result serves both modes unchanged.
"""

import optax

from jaxinf.train.config import TrainConfig

__all__ = ["make_optimizer", "peak_learning_rate"]

# nano: measured over 1,000 steps of the default run, 2e-3 ends at 1.97, 3e-3 at 1.99
# and 5e-3 at 2.43. The others: Brown et al. 2020 (GPT-3), table 2.1, at these sizes.
_LEARNING_RATES = {
    "nano": 2e-3,
    "small": 6e-4,
    "medium": 3e-4,
    "large": 2.5e-4,
    "xl": 2e-4,
}
_WEIGHT_DECAY = 0.1  # GPT-3, and every GPT-2 reproduction since
_MOMENTUM = 0.9
_COSINE_FLOOR = 0.1  # of the peak, as in GPT-3


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then the optimizer under its schedule."""
    chosen = getattr(optax, config.optimizer)
    options = {}
    if config.optimizer in ("adamw", "lion"):
        given = config.weight_decay
        options["weight_decay"] = _WEIGHT_DECAY if given is None else given
    if config.optimizer == "sgd":
        momentum = _MOMENTUM if config.momentum is None else config.momentum
        options["momentum"] = momentum or None
    optimizer = chosen(_schedule(config), **options)
    if not config.clip_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def peak_learning_rate(config: TrainConfig) -> float:
    """The one given, or the preset's."""
    if config.learning_rate is not None:
        return config.learning_rate
    return _LEARNING_RATES[config.preset]


def _schedule(config: TrainConfig) -> optax.ScalarOrSchedule:
    peak, num_warmup = peak_learning_rate(config), config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        num_left = max(1, config.steps - num_warmup)
        after = optax.cosine_decay_schedule(peak, num_left, alpha=_COSINE_FLOOR)
    # From peak / (n + 1): a first step at rate 0 would be a wasted batch.
    warmup = optax.linear_schedule(peak / (num_warmup + 1), peak, num_warmup)
    return optax.join_schedules([warmup, after], [num_warmup]) if num_warmup else after
