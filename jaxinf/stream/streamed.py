"""`jaxinf.stream`: a training step that never has all params in memory.

    batch ─► programs, one after another ─► loss
              ▲ params read ahead   │ gradients, each as soon as it is complete
              └──────── store ◄─────┘ updated near storage; one commit a step

Invariant: a step writes updates to the slot that is not committed. So a crash at any
  point leaves the last committed step. A chunk that a step overwrites in place is
  written after the step's last read of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np
import optax

from jaxinf.activations import CacheCounts
from jaxinf.compress import TopK
from jaxinf.engine import Store, describe, open_store
from jaxinf.errors import StreamError
from jaxinf.io import ByteCounts
from jaxinf.program import trace_init, trace_update
from jaxinf.stream.bound import Binder, Bound, Options
from jaxinf.stream.calls import POLICIES, Policy
from jaxinf.stream.fetch import (
    FetchCounts,
)
from jaxinf.stream.graph import Piece
from jaxinf.stream.initial import initial_inputs, trace_params
from jaxinf.stream.interrupts import Interrupts
from jaxinf.stream.memory import (
    divide,
    return_freed_memory,
    store_memory_bytes,
)
from jaxinf.stream.metrics import StreamMetrics
from jaxinf.stream.places import shard_counts
from jaxinf.stream.plan import Plan, Prepared, least_bytes, prepare
from jaxinf.stream.trace import abstract, check_params
from jaxinf.stream.updates import (
    NonFinitePolicy,
    check_program,
)
from jaxinf.typing import Array, JsonValue, PathLikeStr, PyTree

__all__ = ["StreamedStep", "stream"]


def stream(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation | None = None,
    store: Store | PathLikeStr | None = None,
    *,
    memory_bytes: int,
    device_memory_bytes: int | None = None,
    has_aux: bool = False,
    policy: Policy = "recompute",
    keep: Literal["params"] | int | None = None,
    micro_batches: int = 1,
    replan: bool = False,
    nonfinite: NonFinitePolicy = "error",
    compress: TopK | None = None,
    extra_args: Mapping[str, Any] | None = None,
) -> "StreamedStep":
    """Makes a training step for a model that need not fit in memory.

    The loss function is used as it is. It is traced together with its gradient, and
    that program is cut into parts. Each part reads the params it needs from the store
    and hands its gradients back to it.

    Args:
      loss_fn: ``loss_fn(params, batch)`` gives a scalar, with `has_aux` a pair of it
        and any pytree. Traced by JAX: no side effects.
      tx: Any optimizer that `jaxinf.smart_update` takes, if it needs no more from other
        leaves than scalars of their gradients, such as the norm. Gradients are then
        spilled, to memory and to the store's drive, and updates follow the last one.
      store: From `jaxinf.open_store`, or a path. Its own memory budget is not used.
      memory_bytes: All host memory of a step, including the store's buffers, on top of
        the memory that the process has before.
      device_memory_bytes: Memory of the JAX device for params, values and temporaries,
        if it has its own; by default most of what is free. `memory_bytes` then limits
        what is on the host. On a CPU it limits that part of `memory_bytes`.
      has_aux: Whether the loss comes with a second result.
      policy: ``"recompute"`` computes activations again for the backward pass, segment
        by segment; ``"keep"`` keeps them in memory; ``"offload"`` keeps as many as
        `memory_bytes` allows, and the others on the drive. The bits are the same.
      replan: Whether to replace a kept plan that does not fit.
      nonfinite: The effect of a gradient with NaN or Inf: ``"error"``, ``"skip"`` or
        ``"allow"``, as for `jaxinf.smart_update`.
      keep, micro_batches, compress, extra_args: Not implemented
        yet; any value but the default is refused.

    Returns:
      The step: `StreamedStep.init` or `StreamedStep.load` first, then call it.

    Raises:
      ValueError: An argument is out of range, or not implemented yet.
    """
    missing = {
        "keep": keep is not None,
        "micro_batches": micro_batches != 1,
        "compress": compress is not None,
        "extra_args": bool(extra_args),
        "tx=None": tx is None,
        "store=None": store is None,
    }
    for name, is_given in missing.items():
        if is_given:
            raise ValueError(
                f"jaxinf.stream: {name} is not supported yet; leave it at its default, "
                "or give an optimizer and a store"
            )
    assert tx is not None
    assert store is not None
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    if nonfinite not in ("error", "skip", "allow"):
        raise ValueError(
            f'nonfinite={nonfinite!r}: expected "error", "skip" or "allow"'
        )
    if memory_bytes < 1:
        raise ValueError(f"memory_bytes={memory_bytes}: expected at least 1")
    if device_memory_bytes is not None and device_memory_bytes < 1:
        raise ValueError(
            f"device_memory_bytes={device_memory_bytes}: expected at least 1"
        )
    if isinstance(store, Store):
        owned = store
    else:
        owned = open_store(store, memory_bytes=store_memory_bytes(memory_bytes))
    options = Options(
        memory_bytes, device_memory_bytes, has_aux, policy, replan, nonfinite
    )
    return StreamedStep(loss_fn, tx, owned, options)


# Part of the memory that the store's buffers take while the first step is made.
_INIT_SHARE = 4


class StreamedStep:
    """Made by `jaxinf.stream`; also a context manager. Not thread-safe.

    ``loss, aux = step(batch)`` runs one step and starts its commit; aux is None without
    `has_aux`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        store: Store,
        options: Options,
    ) -> None:
        self.store = store
        self._loss_fn = loss_fn
        self._tx = optax.with_extra_args_support(tx)
        self._options = options
        self._params: PyTree | None = None
        self._bound: dict[Any, Bound] = {}
        self._last: Bound | None = None
        self._waited_s = 0.0  # in the last step, for the store
        self._values = CacheCounts()
        self._num_skipped = 0
        self._binder = Binder(store, self._tx, options)
        self._interrupts = Interrupts()
        return_freed_memory()

    # --- params --------------------------------------------------------------------

    def init(
        self, init_fn: Callable[..., PyTree], *args: Any, batch: PyTree = None
    ) -> None:
        """Makes the store's first step leaf by leaf, or resumes an existing store.

        Args:
          init_fn: ``init_fn(*args)`` returns the params. It is traced, and computed
            only for a new store, one leaf at a time, with the bits of jitted `init_fn`.
          args: Its arguments, such as a random key.
          batch: Arrays, or shapes and dtypes, of a batch. With it a new store's chunks
            suit the program: each slice of stacked layers has its own.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          StreamError: A leaf is too large to be made, or the loss function cannot be
            streamed; nothing is written.
        """
        maker = trace_params(init_fn, *args)
        self._bind(maker.avals, maker.compile, batch)

    def load(self, params: PyTree, *, batch: PyTree = None) -> None:
        """Makes the store's first step from given params, or resumes a store.

        Args:
          params: Tree of arrays; memory-mapped ones are read leaf by leaf.
          batch: As for `init`.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          StreamError: A leaf is not an array of floating-point numbers, or the loss
            function cannot be streamed; nothing is written.
        """
        check_params(params)
        leaves = jax.tree.leaves(params)
        self._bind(abstract(params), lambda _: map(np.asarray, leaves), batch)

    def _bind(
        self,
        avals: PyTree,
        leaves: Callable[[int], Iterable[Array]],
        batch: PyTree,
    ) -> None:
        training, whole = self.store.training, self._options.memory_bytes
        if self._options.policy == "offload" and not self._binder.device_limit.is_host:
            raise StreamError(
                f'policy="offload": not supported yet on {self._binder.device}, which '
                'has memory of its own; use "recompute" or "keep"'
            )
        shapes = [leaf.shape for leaf in check_params(avals)]
        pieces = () if batch is None else self._fitting(avals, batch).gradient_pieces
        counts = shard_counts(shapes, pieces)
        update, first = trace_update(self._tx, avals), trace_init(self._tx, avals)
        check_program(update)
        scalars, inputs = initial_inputs(first, jax.tree.leaves(avals))
        description = describe(update, first, [counts[i] for i in range(len(shapes))])
        self._params = avals
        made: Iterator[Array] = iter(())
        if training.commit is None:
            device_bytes = self._binder.device_limit.num_bytes or whole
            made = iter(leaves(min(device_bytes, whole - whole // _INIT_SHARE)))
        if training.bind(description, may_create=True):
            training.opened.limit_memory(whole // _INIT_SHARE)
            for number in range(len(shapes)):
                leaf = next(made)
                training.initialise(
                    description, number, leaf, [0] * leaf.ndim, inputs[number]
                )
                del leaf  # the next one is made in its memory
            training.finish_initialisation(scalars)
        self._num_skipped = training.opened.finished.skipped_steps
        return_freed_memory()  # of traces and of the first params

    def _fitting(self, avals: PyTree, batch: PyTree) -> Prepared:
        """Traces the loss function, and refuses one that no plan can fit in memory."""
        ready, options = self._prepare(avals, batch), self._options
        sizes = ready.lifetimes.sizes
        largest = max((sizes[piece] for piece in ready.gradient_pieces), default=0)
        division = divide(options.memory_bytes, 0, largest, self._binder.device_limit)
        ready.plan(division.programs, options.policy, least_bytes, division.limit)
        return ready

    def _prepare(self, avals: PyTree, batch: PyTree) -> Prepared:
        return prepare(self._loss_fn, avals, batch, has_aux=self._options.has_aux)

    # --- steps ---------------------------------------------------------------------

    def compile(self, batch: PyTree) -> Plan:
        """Plans and compiles for batches like this one; otherwise the first step does.

        Args:
          batch: Arrays, or shapes and dtypes.

        Raises:
          StreamError: The program cannot be cut to fit, or the kept plan is another's.
        """
        return self._bound_for(batch).runner.plan

    def __call__(self, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Runs one step; blocks until all its gradients are handed out.

        Returns:
          The loss, and aux; None without `has_aux`.

        Raises:
          NonFiniteGradientError: The step was refused; the store stays where it was.
          BaseException: The exception that stopped the store.
        """
        training = self.store.training
        training.check()
        bound = self._take_turn(self._bound_for(batch))
        began_s = time.perf_counter()
        training.join()
        self._waited_s = time.perf_counter() - began_s
        bound.fetcher.counts = FetchCounts()
        bound.updates.waited_s = 0.0
        bound.runner.values.counts()
        with self._interrupts.held_back():
            bound.updates.begin()
            try:
                loss, aux = self._run(bound, batch)
                self._values = bound.runner.values.counts()
                self._waited_s += bound.updates.waited_s
                began_s = time.perf_counter()
                has_advanced = bound.updates.finish(self._interrupts.check)
                self._num_skipped += not has_advanced
                self._waited_s += time.perf_counter() - began_s
            except BaseException:
                bound.updates.abandon()
                raise
        return loss, aux if self._options.has_aux else None

    def _run(self, bound: Bound, batch: PyTree) -> tuple[jax.Array, PyTree]:
        try:
            bound.fetcher.begin()
            return bound.runner(
                batch,
                lambda number, piece: self._fetched(bound, number, piece),
                lambda piece, gradient: self._hand_out(bound, piece, gradient),
                bound.fetcher.done,
            )
        finally:
            bound.runner.settle()  # before the memory that they read is freed
            bound.fetcher.stop()

    def _fetched(self, bound: Bound, number: int, piece: Any) -> jax.Array:
        self._interrupts.check()
        unit = bound.places.unit(piece)
        array = bound.fetcher.get(number, unit)
        part = bound.places.part(unit, piece)
        return part.of(array) if part.index or part.rows else array

    def _hand_out(self, bound: Bound, piece: Piece, gradient: jax.Array) -> None:
        if not self._binder.device_limit.is_host:
            gradient.copy_to_host_async()
        bound.updates.hand_out(piece, gradient)

    def _take_turn(self, bound: Bound) -> Bound:
        """Gives the memory to a plan; the step before may have been of another."""
        if self._last is not None and self._last is not bound:
            self._last.fetcher.rest()
        self.store.training.opened.limit_memory(bound.store_bytes)
        self._last = bound
        return bound

    def _bound_for(self, batch: PyTree) -> Bound:
        if self._params is None:
            raise StreamError(
                "jaxinf.stream: call step.init or step.load first; with a store that "
                "has a step they resume it"
            )
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._bound:
            self._bound[key] = self._binder.bind(
                self._prepare(self._params, batch), self._params
            )
            return_freed_memory()  # of planning and compilation
        return self._bound[key]

    # --- control -------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step; None before the first."""
        return None if self._last is None else self._last.runner.plan

    @property
    def traffic(self) -> ByteCounts | None:
        """Bytes that the plan moves on the drive in a step; None before the first.

        An optimizer that leaves state alone in some steps moves fewer in those.
        """
        return None if self._last is None else self._last.traffic

    @property
    def metrics(self) -> StreamMetrics | None:
        """Metrics of the last step; None before the first."""
        bound = self._last
        if bound is None:
            return None
        counts, values = bound.fetcher.counts, self._values
        in_memory, on_drive = bound.updates.spilled_bytes
        return StreamMetrics(
            fetched_drive_bytes=counts.num_bytes,
            fetched_memory_bytes=bound.reused_bytes,
            spilled_memory_bytes=in_memory,
            spilled_drive_bytes=on_drive,
            offloaded_drive_bytes=values.num_written_bytes,
            prefetch_hit_rate=counts.hit_rate,
            waited_params_s=counts.waited_s,
            waited_values_s=values.waited_s,
            waited_device_s=bound.runner.waited_s,
            waited_updates_s=self._waited_s,
            dispatched_s=bound.runner.dispatched_s,
        )

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped

    def annotate(self, payload: JsonValue) -> None:
        """Sets the caller's payload for the commit of the next step.

        Blocks until the last step has ended.

        Args:
          payload: JSON: position in the data, random seeds, ….

        Raises:
          ValueError, TypeError: It is not JSON.
        """
        training = self.store.training
        training.join()
        training.annotate(training.opened.finished.step + 1, payload)

    def close(self) -> None:
        """Finishes the commit in flight and closes the store; idempotent."""
        self._close_bound()
        self.store.close()

    def _close_bound(self) -> None:
        for bound in self._bound.values():
            bound.runner.values.close()
            bound.fetcher.close()
            bound.updates.close()

    def __enter__(self) -> "StreamedStep":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_bound()
        self.store.__exit__(kind, error, trace)
