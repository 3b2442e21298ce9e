"""`jaxinf.stream` and its two variants: they check arguments and make the step.

Invariant: an option that has no effect is refused by name.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import optax

from jaxinf.compress import TopK
from jaxinf.engine import Store, check_compression, engine_of, open_store
from jaxinf.processes import all_processes
from jaxinf.program import Average, NonFinitePolicy, with_average
from jaxinf.streaming.function import FunctionHome
from jaxinf.streaming.in_memory import MemoryHome
from jaxinf.streaming.in_store import StoreHome
from jaxinf.streaming.plan.calls import Policy
from jaxinf.streaming.plan.memory import store_memory_bytes
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.step import StreamedStep
from jaxinf.streaming.update.device_updates import device_interval
from jaxinf.terminal import check_choice, exact_bytes, format_bytes, given_bytes
from jaxinf.transfer import MACHINE_MEMORY_BYTES, free_memory
from jaxinf.typing import PathLikeStr, PyTree

_LOG = logging.getLogger("jaxinf")


def stream(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    store: Store | PathLikeStr,
    *,
    memory_bytes: int | str | None = None,
    device_memory_bytes: int | str | None = None,
    has_aux: bool = False,
    policy: Policy = "recompute",
    micro_batches: int = 1,
    weights: Callable[[PyTree], Any] | None = None,
    replan: bool = False,
    nonfinite: NonFinitePolicy = "error",
    average: Average | None = None,
    compress: TopK | None = None,
    extra_args: Mapping[str, Any] | None = None,
    deterministic: bool = True,
    device_updates: int | Literal["auto"] | None = None,
    carry: Callable[[PyTree], PyTree] | None = None,
) -> StreamedStep:
    """Makes a training step for a model that need not fit in memory.

    The loss function is used as it is. It is traced together with its gradient, and
    that program is cut into parts. Each part reads the params it needs from the store
    and hands its gradients back to it. Params and batches may be sharded over a mesh of
    this process's devices (docs/streaming.md, "Several devices").

    Args:
      loss_fn: ``loss_fn(params, batch)`` gives a scalar, with `has_aux` a pair of it
        and any pytree. Traced by JAX: no side effects.
      tx: An optax transformation (docs/optimizers.md lists them). If a leaf's update
        needs numbers of all gradients, such as their norm, gradients are spilled, to
        memory and to the store's drive, and updates follow the last one.
      store: From `jaxinf.open_store`, or a path. Its own memory budget is not used.
      memory_bytes: All host memory of a step, including the store's buffers, on top of
        the memory that the process has before; in bytes, or as a text such as
        ``"4GiB"``. By default half of what the process may still take, which is
        logged; to be given in a program of several processes.
      device_memory_bytes: Memory of the JAX device for params, values and temporaries,
        if it has its own; by default most of what is free. `memory_bytes` then limits
        what is on the host, values that have left the device included. On a CPU it
        limits that part of `memory_bytes`. Of several devices it limits each.
      has_aux: Whether the loss comes with a second result.
      policy: ``"recompute"`` computes activations again for the backward pass, segment
        by segment; ``"keep"`` keeps them in memory; ``"offload"`` keeps as many as
        `memory_bytes` allows, and the others on the drive (those of a device with its
        own memory on the host, and on the drive what has no room there); ``"plan"``
        begins so, measures three steps, and from then on recomputes what the drive is
        too slow for, where that takes less time. The bits are the same.
      micro_batches: Number of equal parts of a batch. A program runs for each part
        before the next program, so params are read once for all of them; values of all
        parts wait meanwhile. Gradients are averaged, so losses are those of the whole
        batch if the loss is a mean over its rows. aux gets a first axis of parts.
      weights: With `micro_batches`, ``weights(part)`` gives the weight of a part, such
        as the number of tokens that its loss is a mean over: loss and gradients are
        then those of the whole batch. Equal weights by default.
      replan: Whether to replace the plan that the store keeps.
      nonfinite: The effect of a gradient with NaN or Inf: ``"error"``, ``"skip"`` or
        ``"allow"``; see `jaxinf.smart_update`.
      average, compress: Options of `jaxinf.smart_update`.
      extra_args: Further arguments of the optimizer's update, with an example for each;
        numbers and arrays are also the values of steps that are given none. ``"value"``
        is each step's loss, unless a step is given another.
      deterministic: Whether programs have the same bits in each run, so that a resumed
        run goes on to the bit. On a GPU they are then compiled with
        ``xla_gpu_deterministic_ops``, which may make them slower; a flag in
        ``XLA_FLAGS`` has precedence. Nothing changes elsewhere (docs/accelerators.md).
      device_updates: The JAX device computes the updates of every so many subgroups of
        the optimizer's state, while the host computes the others; 1 for all that it
        can, 0 for none. ``"auto"`` measures a new store's first steps, and from then on
        keeps to what saves most time, or to 0. Their copies take a fixed part of the
        device's memory. By default as in the store's last step, and none in a new store
        (docs/streaming.md, "Updates on the device").
      carry: With `has_aux`, ``carry(aux)`` gives a tree of arrays that are committed
        with the step, 64 MiB at most: batch statistics, typed keys, counters.
        `Store.carried` returns them.

    Returns:
      The step: `StreamedStep.init` or `StreamedStep.load` first, then call it.

    Raises:
      ValueError: An argument is out of range, or has no effect.
    """
    options = _options(
        memory_bytes,
        device_memory_bytes,
        has_aux=has_aux,
        policy=policy,
        replan=replan,
        nonfinite=nonfinite,
        micro_batches=micro_batches,
        weights=weights,
        average=average,
        compress=compress,
        extra_args=dict(extra_args or {}),
        deterministic=deterministic,
        carry=carry,
    )
    if carry is not None and not has_aux:
        raise ValueError("carry: expected a loss with aux, found none; has_aux=True")
    opened = _open(store, options)
    check_compression(compress, engine_of(opened).options)
    is_compressed = compress is not None
    interval = device_interval(
        device_updates, opened, replan=replan, is_compressed=is_compressed
    )
    options = replace(options, device_updates=interval)
    home = StoreHome(with_average(tx, average), opened, options)
    return StreamedStep(loss_fn, home, options)


def stream_in_memory(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    memory_bytes: int | str | None = None,
    device_memory_bytes: int | str | None = None,
    has_aux: bool = False,
    policy: Policy = "recompute",
    micro_batches: int = 1,
    weights: Callable[[PyTree], Any] | None = None,
    nonfinite: NonFinitePolicy = "error",
    scratch: PathLikeStr | None = None,
    deterministic: bool = True,
) -> StreamedStep:
    """Makes a training step whose params and optax state are in memory.

    Only the activations are streamed; `tx` is any optax transformation, unchanged.

    Args:
      loss_fn, tx, memory_bytes, device_memory_bytes: Arguments of `jaxinf.stream`.
      has_aux, policy, micro_batches, weights, nonfinite, deterministic: Others of it.
      scratch: A folder on a drive for the values of ``"offload"``; by default the
        folder for temporary files, which some systems have in memory.

    Returns:
      The step: `StreamedStep.init` or `StreamedStep.load` first, then call it.

    Raises:
      ValueError: An argument is out of range, or has no effect.
    """
    options = _options(
        memory_bytes,
        device_memory_bytes,
        has_aux=has_aux,
        policy=policy,
        nonfinite=nonfinite,
        micro_batches=micro_batches,
        weights=weights,
        deterministic=deterministic,
    )
    home = MemoryHome(tx, options, scratch or tempfile.gettempdir())
    return StreamedStep(loss_fn, home, options)


def stream_function(
    fn: Callable[..., Any],
    store: Store | PathLikeStr,
    *,
    memory_bytes: int | str | None = None,
    device_memory_bytes: int | str | None = None,
    average: bool = False,
    deterministic: bool = True,
) -> StreamedStep:
    """Makes a function of a store's params, for evaluation and generation.

    Args:
      fn: ``fn(params, batch)`` returns any pytree. Traced by JAX: no side effects.
      store, memory_bytes, device_memory_bytes, deterministic: As of `jaxinf.stream`.
      average: Whether it is a function of the params' average instead.

    Returns:
      ``f(batch)``, which returns the outputs for the params of the last finished step;
      `StreamedStep.load` tells it the params' tree, if that is not nested dicts.

    Raises:
      ValueError: An argument is out of range.
    """
    options = _options(
        memory_bytes,
        device_memory_bytes,
        has_aux=True,
        policy="keep",
        deterministic=deterministic,
    )
    opened = _open(store, options)
    home = FunctionHome(opened, closes=opened is not store, average=average)
    return StreamedStep(fn, home, options)


def _open(store: Store | PathLikeStr, options: Options) -> Store:
    if isinstance(store, Store):
        return store
    return open_store(store, memory_bytes=store_memory_bytes(options.memory_bytes))


def _options(
    memory_bytes: int | str | None,
    device_memory_bytes: int | str | None,
    **given: Any,
) -> Options:
    """Returns the options of a step; raises ValueError for one out of range."""
    if memory_bytes is None:
        memory_bytes = _half_of_free_memory()
    host_bytes = given_bytes("memory_bytes", memory_bytes)
    device_bytes = None
    if device_memory_bytes is not None:
        device_bytes = given_bytes("device_memory_bytes", device_memory_bytes)
    options = Options(host_bytes, device_bytes, **given)
    check_choice("policy", options.policy, Policy)
    check_choice("nonfinite", options.nonfinite, NonFinitePolicy)
    if options.micro_batches < 1:
        raise ValueError(f"micro_batches={options.micro_batches}: expected at least 1")
    if options.weights is not None and options.micro_batches == 1:
        raise ValueError(
            "weights: expected several parts of a batch, found micro_batches=1; give "
            "more, or leave weights out"
        )
    return options


def _half_of_free_memory() -> int:
    """Logs and returns the default of `memory_bytes`; refuses several processes."""
    free_bytes, limit = free_memory() or (MACHINE_MEMORY_BYTES, "the machine")
    count = all_processes("jaxinf.stream").count
    if count > 1:
        share = exact_bytes((free_bytes // 2 // count) >> 20 << 20)
        raise ValueError(
            f"memory_bytes: expected the memory of each of {count} processes, found "
            f'none; give it to all of them, memory_bytes="{share}" if they share half '
            f"of what {limit} leaves"
        )
    _LOG.warning(
        "memory_bytes: %s, half of the %s that %s leaves this process; give "
        "memory_bytes for another budget",
        format_bytes(free_bytes // 2),
        format_bytes(free_bytes),
        limit,
    )
    return free_bytes // 2
