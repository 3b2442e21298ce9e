"""The models by name: their presets, their tasks, and how to make one from a config.

Invariant: facts that are common to all models are stated here, once.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from . import bert, bloom, gpt2, llama, t5, vit
from .layers import ModelConfig
from .losses import TaskName

Params: TypeAlias = dict[str, Any]

_NOT_OF_THE_MODEL = ("dtype", "param_dtype", "head")


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    Attributes:
      name: its name on a command line.
      model_type: its class, called as ``model_type(config, rngs=nnx.Rngs(seed))``.
      presets: configs by name; ``nano`` is for a small machine and a vocabulary of
        bytes.
      tasks: tasks that it can be trained for, the usual one first.
    """

    name: str
    config_type: type[ModelConfig]
    model_type: Any
    presets: Mapping[str, Any]
    tasks: tuple[TaskName, ...]


_CAUSAL: tuple[TaskName, ...] = ("causal-lm", "classification")
_MASKED: tuple[TaskName, ...] = ("masked-lm", "classification")
MODELS: Mapping[str, ModelFamily] = {
    family.name: family
    for family in (
        ModelFamily("gpt2", gpt2.GPT2Config, gpt2.GPT2, gpt2.PRESETS, _CAUSAL),
        ModelFamily("bert", bert.BertConfig, bert.Bert, bert.PRESETS, _MASKED),
        ModelFamily("t5", t5.T5Config, t5.T5, t5.PRESETS, ("seq2seq",)),
        ModelFamily("vit", vit.ViTConfig, vit.ViT, vit.PRESETS, ("classification",)),
        ModelFamily(
            "bloom", bloom.BloomConfig, bloom.Bloom, bloom.PRESETS, _CAUSAL[:1]
        ),
        ModelFamily("llama", llama.LlamaConfig, llama.Llama, llama.PRESETS, _CAUSAL),
    )
}


def family_of(config: ModelConfig) -> ModelFamily:
    return next(f for f in MODELS.values() if f.config_type is type(config))


def config_for(config: Any, task: TaskName, *, num_labels: int | None = None) -> Any:
    """Returns a config with the head that a task needs.

    Args:
      num_labels: classes of a classification; by default the config's own number.

    Raises:
      ValueError: the model does not have the task; the message names its tasks.
    """
    family = family_of(config)
    if task not in family.tasks:
        raise ValueError(
            f"task {task}: expected one of {family.name}'s: {', '.join(family.tasks)}"
        )
    fields = {field.name for field in dataclasses.fields(config)}
    changes: dict[str, Any] = {"head": task} if "head" in fields else {}
    if task == "classification" and num_labels is not None:
        changes["num_labels"] = num_labels
    return dataclasses.replace(config, **changes)


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Returns a config as JSON, without precision and task."""
    fields = dataclasses.asdict(config)
    if fields.get("head") == "causal-lm":
        del fields["num_labels"]  # it has no classes
    return {k: v for k, v in fields.items() if k not in _NOT_OF_THE_MODEL}


def config_from_json(name: str, fields: Mapping[str, Any]) -> Any:
    """Makes a config of the named architecture; the reverse of `config_to_json`.

    Raises:
      ValueError, TypeError: a field is out of range, of another type or not known.
    """
    if isinstance(scaling := fields.get("rope_scaling"), Mapping):
        fields = {**fields, "rope_scaling": llama.RopeScaling(**scaling)}
    return MODELS[name].config_type(**fields)


def make_model(config: ModelConfig, *, rngs: nnx.Rngs) -> Any:
    return family_of(config).model_type(config, rngs=rngs)


def split(model: nnx.Module) -> tuple[Any, Params]:
    """Splits into a static, hashable graphdef and params as a plain nested dict.

    `nnx.merge(graphdef, params)` is the way back, also inside jit and grad::

        graphdef, params = split(make_model(config, rngs=nnx.Rngs(0)))
        grads = jax.grad(lambda p: loss(nnx.merge(graphdef, p), x, y))(params)
    """
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig) -> tuple[Any, Params]:
    """Like `split`, but with `jax.ShapeDtypeStruct`s, which take no memory."""
    graphdef, leaves, tree = _abstract(config)
    return graphdef, jax.tree.unflatten(tree, leaves)


@functools.lru_cache(maxsize=64)
def _abstract(config: ModelConfig) -> tuple[Any, list[Any], Any]:
    rngs: Any = _OneKey()
    graphdef, params = split(nnx.eval_shape(lambda: make_model(config, rngs=rngs)))
    return graphdef, *jax.tree.flatten(params)


class _OneKey:
    """Stands for `nnx.Rngs` where no values are made.

    Its counters take a trace time that grows with the square of a model's depth.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


@functools.lru_cache(maxsize=64)
def num_params(config: ModelConfig) -> int:
    """Returns the number of parameters; tied ones count once."""
    _, params = abstract_params(config)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
