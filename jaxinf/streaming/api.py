"""`jaxinf.stream`: checks its arguments and makes the step that they ask for.

Invariant: an option that has no effect is refused by name.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import optax

from jaxinf.compress import TopK
from jaxinf.engine import Store, check_compression, open_store
from jaxinf.program import NonFinitePolicy, check_nonfinite
from jaxinf.streaming.bound import Options
from jaxinf.streaming.function import FunctionOptions, StreamedFunction
from jaxinf.streaming.in_memory import InMemoryStep
from jaxinf.streaming.plan.calls import POLICIES, Policy
from jaxinf.streaming.plan.forms import FORMS, Form
from jaxinf.streaming.plan.memory import store_memory_bytes
from jaxinf.streaming.plan.resident import check_keep
from jaxinf.streaming.step import StreamedStep
from jaxinf.terminal import given_bytes
from jaxinf.typing import PathLikeStr

__all__ = ["stream"]


@overload
def stream(
    loss_fn: Callable[..., Any],
    tx: None = None,
    store: Store | PathLikeStr | None = None,
    *,
    memory_bytes: int | str,
    device_memory_bytes: int | str | None = None,
    keep: Literal["params"] | int | str | None = None,
) -> StreamedFunction: ...


@overload
def stream(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    store: Store | PathLikeStr,
    *,
    memory_bytes: int | str,
    device_memory_bytes: int | str | None = None,
    has_aux: bool = False,
    policy: Policy = "recompute",
    keep: Literal["params"] | int | str | None = None,
    micro_batches: int = 1,
    replan: bool = False,
    nonfinite: NonFinitePolicy | None = None,
    compress: TopK | None = None,
    extra_args: Mapping[str, Any] | None = None,
    activations: Form | None = None,
    endurance_tbw: float | None = None,
) -> StreamedStep: ...


@overload
def stream(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    store: None = None,
    *,
    memory_bytes: int | str,
    device_memory_bytes: int | str | None = None,
    has_aux: bool = False,
    policy: Policy = "recompute",
    keep: Literal["params"],
    micro_batches: int = 1,
    nonfinite: NonFinitePolicy | None = None,
    scratch: PathLikeStr | None = None,
    activations: Form | None = None,
    endurance_tbw: float | None = None,
) -> InMemoryStep: ...


def stream(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation | None = None,
    store: Store | PathLikeStr | None = None,
    *,
    memory_bytes: int | str,
    device_memory_bytes: int | str | None = None,
    has_aux: bool = False,
    policy: Policy = "recompute",
    keep: Literal["params"] | int | str | None = None,
    micro_batches: int = 1,
    replan: bool = False,
    nonfinite: NonFinitePolicy | None = None,
    compress: TopK | None = None,
    extra_args: Mapping[str, Any] | None = None,
    endurance_tbw: float | None = None,
    scratch: PathLikeStr | None = None,
    activations: Form | None = None,
) -> StreamedStep | StreamedFunction | InMemoryStep:
    """Makes a training step for a model that need not fit in memory.

    The loss function is used as it is. It is traced together with its gradient, and
    that program is cut into parts. Each part reads the params it needs from the store
    and hands its gradients back to it.

    Without `tx` it makes a function of the store's params, for evaluation and
    generation: ``jaxinf.stream(fn, store=store, memory_bytes=…)(batch)`` returns the
    outputs of ``fn(params, batch)``.

    Without `store`, but with ``keep="params"``, params and optax's state are in memory,
    and only the activations are streamed.

    With a store, params and batches may be sharded over a mesh of this process's
    devices (docs/streaming.md, "Several devices").

    Args:
      loss_fn: ``loss_fn(params, batch)`` gives a scalar, with `has_aux` a pair of it
        and any pytree; without `tx` any pytree. Traced by JAX: no side effects.
      tx: An optax transformation (docs/optimizers.md lists them). If a leaf's update
        needs numbers of all gradients, such as their norm, gradients are spilled, to
        memory and to the store's drive, and updates follow the last one.
      store: From `jaxinf.open_store`, or a path. Its own memory budget is not used.
        None for plain optax in memory, with ``keep="params"``.
      memory_bytes: All host memory of a step, including the store's buffers, on top of
        the memory that the process has before; in bytes, or as a text such as
        ``"4GiB"``.
      device_memory_bytes: Memory of the JAX device for params, values and temporaries,
        if it has its own; by default most of what is free. `memory_bytes` then limits
        what is on the host, values that have left the device included. On a CPU it
        limits that part of `memory_bytes`. Of several devices it limits each.
      has_aux: Whether the loss comes with a second result.
      policy: ``"recompute"`` computes activations again for the backward pass, segment
        by segment; ``"keep"`` keeps them in memory; ``"offload"`` keeps as many as
        `memory_bytes` allows, and the others on the drive (those of a device with its
        own memory on the host, and on the drive what has no room there); ``"plan"``
        measures its first steps, and then does for each value what makes a step
        fastest. The bits are the same.
      replan: Whether to replace a kept plan that does not fit.
      nonfinite: The effect of a gradient with NaN or Inf: ``"error"``, ``"skip"`` or
        ``"allow"``, with the default of `jaxinf.smart_update`.
      keep: Params that stay on the JAX device between steps: ``"params"`` for all, or
        the most bytes, such as ``"2GiB"``; of the params those that save most traffic.
        They are a part of `memory_bytes`, or of the device's memory if it has its own.
      micro_batches: Number of equal parts of a batch that run one after another, each
        in the memory of a part. Their gradients are averaged, so losses are those of
        the whole batch if the loss is a mean over it. aux gets a first axis of parts.
      compress: As for `jaxinf.smart_update`.
      extra_args: Further arguments of the optimizer's update, with an example for each;
        numbers and arrays are also the values of steps that are given none. ``"value"``
        is each step's loss, unless a step is given another.
      scratch: Without `store`, a folder on a drive for the values of ``"offload"`` and
        ``"plan"``; by default the folder for temporary files, which some systems have
        in memory.
      activations: With ``"offload"`` and ``"plan"``, the form of floating-point values
        on the drive: ``"bf16"``, or ``"int8"`` in blocks of 256 with a scale; by
        default they are exact. Losses keep their bits, since forward reads nothing that
        has been rounded; gradients do not, and depend on which values leave.
      endurance_tbw: Rated writes of the drives, in TB: a step warns if it wears them
        out within a year. Without it `StreamedStep.wear` says how long drives of common
        classes last.

    Returns:
      The step: `StreamedStep.init` or `StreamedStep.load` first, then call it. Without
      `tx` a `StreamedFunction`, which has only memory and `keep` as options; without
      `store` an `InMemoryStep`.

    Raises:
      ValueError: An argument is out of range, or has no effect.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    check_nonfinite(nonfinite)
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected at least 1")
    memory_bytes = given_bytes("memory_bytes", memory_bytes)
    if endurance_tbw is not None and not 0 < endurance_tbw < math.inf:
        raise ValueError(
            f"endurance_tbw={endurance_tbw}: expected a finite number above 0"
        )
    if device_memory_bytes is not None:
        device_memory_bytes = given_bytes("device_memory_bytes", device_memory_bytes)
    keeps = check_keep(keep)
    if tx is None:
        _check_function(
            has_aux=has_aux,
            policy=policy != "recompute",
            replan=replan,
            micro_batches=micro_batches != 1,
            nonfinite=nonfinite is not None,
            compress=compress is not None,
            extra_args=bool(extra_args),
            activations=activations is not None,
            endurance_tbw=endurance_tbw is not None,
        )
    if activations not in (None, *FORMS):
        raise ValueError(f"activations={activations!r}: expected 'bf16' or 'int8'")
    if activations is not None and policy in ("recompute", "keep"):
        raise ValueError(
            f'activations={activations!r}: no value leaves with policy="{policy}"; '
            'leave it out, or give policy="offload" or "plan"'
        )
    options = Options(
        memory_bytes,
        device_memory_bytes,
        has_aux,
        policy,
        replan,
        nonfinite,
        keeps,
        micro_batches,
        compress,
        dict(extra_args or {}),
        activations,
        endurance_tbw,
    )
    if store is None:
        _check_in_memory(options, has_optimizer=tx is not None)
        assert tx is not None
        return InMemoryStep(loss_fn, tx, options, scratch or tempfile.gettempdir())
    if scratch is not None:
        raise ValueError(
            "scratch: values are on the drives of the store; leave it out, or leave "
            "out the store"
        )
    if isinstance(store, Store):
        owned = store
    else:
        owned = open_store(store, memory_bytes=store_memory_bytes(memory_bytes))
    if tx is None:
        return StreamedFunction(
            loss_fn,
            owned,
            FunctionOptions(memory_bytes, device_memory_bytes, keeps),
            closes=owned is not store,
        )
    check_compression(compress, owned)
    return StreamedStep(loss_fn, tx, owned, options)


def _check_in_memory(options: Options, *, has_optimizer: bool) -> None:
    if not has_optimizer or options.keep != "params":
        raise ValueError(
            "jaxinf.stream: expected a store (store=), or an optimizer (tx=) and "
            'keep="params" to train with params and state in memory'
        )
    for name in ("compress", "extra_args"):
        if getattr(options, name):
            raise ValueError(
                f"jaxinf.stream: {name} has no effect without a store; leave it out"
            )
    if options.replan:
        raise ValueError(
            "jaxinf.stream: replan has no effect without a store, which keeps plans; "
            "leave it out"
        )


def _check_function(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"jaxinf.stream: {name} has no effect on a function without a "
                "gradient; leave it out, or give an optimizer (tx)"
            )
