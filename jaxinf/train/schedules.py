"""The learning rate of each step, and the defaults that depend on the kind of run.

Invariant: a default is a function of the config alone, never of the number of steps. So
a run with a constant rate that is made longer keeps its steps.
"""

import math
from collections.abc import Callable

import jax
import optax
from jaxinf_models import num_params

from jaxinf.train.config import TrainConfig
from jaxinf.typing import JsonValue

# nano: measured over 1,000 steps of the default run, 2e-3 ends at 1.97, 3e-3 at 1.99
# and 5e-3 at 2.43. The others: Brown et al. 2020 (GPT-3), table 2.1, at the sizes that
# lie between these bounds.
_LEARNING_RATES = {
    20e6: 2e-3,
    250e6: 6e-4,
    600e6: 3e-4,
    1.2e9: 2.5e-4,
    5e9: 2e-4,
    math.inf: 1.2e-4,
}
_WEIGHT_DECAY = 0.1  # GPT-3, and every GPT-2 reproduction since
_NUM_WARMUP_STEPS = 50
_COSINE_FLOOR = 0.1  # of the peak, as in GPT-3
# Of all steps, as in Hägele et al. 2024 (arXiv:2405.18392), section 4.
_STABLE_SHARE = 0.8

# Weights that are learned already. A tenth of the rates above lies within the 2e-5 to
# 5e-5 of Devlin et al. 2019 (BERT) for 250 M and more, and near the 2e-5 of Llama 2
# (Touvron et al. 2023, section 3.1) at 7 B. Decay would pull weights from theirs to 0.
# Adapters are new, and have the rates above.
_FINE_TUNING_SHARE = 0.1
_FINE_TUNING_DECAY = 0.0
_FINE_TUNING_WARMUP_STEPS = 30  # 3 % of the default number of steps


def peak_learning_rate(config: TrainConfig) -> float:
    """Returns the given rate, or the default for a model of this size."""
    if config.learning_rate is not None:
        return config.learning_rate
    size = num_params(config.model_config)
    rate = next(rate for bound, rate in _LEARNING_RATES.items() if size < bound)
    is_whole = config.source is not None and config.lora is None
    return rate * _FINE_TUNING_SHARE if is_whole else rate


def weight_decay(config: TrainConfig) -> float | None:
    """Returns the decay of adamw and lion, given or by default; None for others."""
    if config.optimizer not in ("adamw", "lion"):
        return None
    for word in config.optimizer_args:
        key, _, text = word.partition("=")
        if key == "weight_decay":
            return float(text)
    return _WEIGHT_DECAY if config.source is None else _FINE_TUNING_DECAY


def num_warmup_steps(config: TrainConfig) -> int:
    """Returns the steps of the warm-up, given or by default."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return _NUM_WARMUP_STEPS if config.source is None else _FINE_TUNING_WARMUP_STEPS


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Makes the learning rate as a function of the number of updates before."""
    peak, num_warmup = peak_learning_rate(config), num_warmup_steps(config)
    num_left = max(1, config.steps - num_warmup)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, num_left, alpha=_COSINE_FLOOR)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, num_left)
    else:
        num_stable = max(0, round(_STABLE_SHARE * config.steps) - num_warmup)
        after = optax.linear_schedule(
            *(peak, 0.0), max(1, num_left - num_stable), num_stable
        )
    # Starts at peak / (n + 1), because a first step at rate 0 would waste a batch.
    warmup = optax.linear_schedule(peak / (num_warmup + 1), peak, num_warmup)
    return optax.join_schedules([warmup, after], [num_warmup]) if num_warmup else after


def learning_rates(config: TrainConfig) -> Callable[[int], float]:
    """Returns a function from the number of updates before to the learning rate."""
    schedule = jax.jit(make_schedule(config))
    return lambda count: float(schedule(count))


def resolved_settings(config: TrainConfig) -> dict[str, JsonValue]:
    """Returns the settings that had no flag, as the run has them."""
    return {
        "task": config.task_name,
        "learning_rate": peak_learning_rate(config),
        "weight_decay": weight_decay(config),
        "warmup_steps": num_warmup_steps(config),
    }
