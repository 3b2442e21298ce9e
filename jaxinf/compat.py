"""All uses of JAX, optax, XLA and Orbax that another version may break.

Invariant: uses that are experimental, not exported or not promised go through this
module alone; ``tests/test_compat.py`` fails on others. Supported versions:
docs/dependencies.md; ``make test-newest`` tries newer ones.

==========================  ==========================================================
used here                   where it may break, and the effect
==========================  ==========================================================
``buffer_callback``         experimental. Not there: `io_callback` brings gradients, at
                            the cost of a copy; same bits. Takes other arguments: the
                            first update fails while it is traced
``io_callback``             experimental. Not there: ``import jaxinf`` fails
``jax.shard_map``           ``check_vma`` was ``check_rep``. Renamed: sharded updates
                            fail while they are traced
``Tracer``                  of ``jax.core``, which shrinks. Not there: ``import jaxinf``
                            fails
``PJRT_NPROC``              read by XLA's CPU client. Not read any more: runs on several
                            CPU devices may hang, which the tests of four devices show
``backends_are_…``          of ``jax._src``. Not there: closing a store starts JAX's
                            backend in a process that has not used it
``global_state``            of ``jax._src.distributed``: the client of the coordination
                            service, its barriers and keys, the text of a time-out. Not
                            there: stores of several processes are refused when opened
``trace_state_clean``       of ``jax._src``. Not there: a streamed step in an eager
                            ``jax.grad`` or ``jax.vmap`` runs if its batch is known
logger of callbacks         moves with JAX's modules. Moved: JAX's traceback is printed
                            before the error
modules of callbacks        move with JAX's. Moved: Ctrl-C just before or behind a
                            callback of a store fails the computation
``Primitive``, ``Literal``  of ``jax.extend.core``, and jaxprs; fields of equations,
                            which ``jaxinf/program/graph.py`` and ``jaxinf/stream``
                            read. Not there: ``tx.init`` fails while it traces
``jax.interpreters``        rules of a primitive of our own. Not there, or other rules:
                            ``import jaxinf`` fails, or ``tx.update`` while it is traced
``axis_context``            of a lowering: how many devices the computation has. Not
                            there: an update in a process with several devices fails
                            while it is compiled
``manual_axes``             of the mesh in use. Not there: an update in ``pmap`` fails
                            with an error of JAX's
shardings in types          of abstract values, and parameters of
                            ``sharding_constraint``. Others: streaming on several
                            devices fails while it is traced
``get_bind_params``         of primitives, with the equation's context. Another result:
                            the prologue fails while it is traced
names of primitives         an unknown one: ``tx.init`` refuses the optimizer and names
                            the primitive
parameters of primitives    an unknown one: ``KeyError`` in ``tx.init``
tracebacks of equations     not promised. Others: a refusal does not say which optax
                            transformation the primitive came from; a warning of large
                            arrays in a loss function fails
key classes, ``keystr``     of ``jax.tree_util``. Other classes: names of leaves, or of
                            scalars, are not those of a store, which is refused.
                            Another text: error messages have it; no file does
``serialization`` of Flax    registers placeholders, where a program uses Flax. Moved:
                            ``flax.serialization.to_bytes`` of a state fails
callers that flatten        modules of JAX, optax and Flax among the callers. Others:
                            steps of a program's own checkpoints are not kept, or more
                            than these, unless it calls ``store.wait(state)``
frames of ``MultiSteps``    optax's own callers are looked at. Not a method any more:
                            ``MultiSteps(smart_update(…))`` is not refused
frames of ``lookahead``     the same, by their module. Others: the params differ from
                            the store's when slow ones follow, and the run stops
placeholder of params       of ``optax.tree.map_params``, not public. Renamed: that
                            function fails for a state
schedule of ``MultiSteps``  not public. Not there: ``MultiSteps(tx, 1)`` stores a sum
bits of ``jax.random``      computed as Threefry of each element's index. Computed
                            otherwise: streaming draws other first params than jitted
                            code for leaves that are large beside the budget
library fusions of XLA       an option of its CPU compiler. Not there, or other names:
                            programs take the default, and may take more memory than
                            is planned
deterministic ops of XLA    an option of its GPU compiler. Not there, or another name:
                            compiling a streamed program fails and names it;
                            ``deterministic=False`` goes without
Orbax's handler, key type   written to a checkpoint's metadata. Moved: Orbax restores it
                            only when it is told the handler
==========================  ==========================================================

Beyond names: `jaxinf.kernels.lowering` follows what XLA's CPU compiler does with an
update. Another XLA may round otherwise; ``tests/kernels/test_bits.py`` compares.
"""

import functools
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.experimental import io_callback
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    keystr,
)

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:
    buffer_callback = None

try:
    from jax._src.xla_bridge import backends_are_initialized
except ImportError:
    backends_are_initialized = None

try:
    from jax._src.distributed import global_state as _distributed
except ImportError:
    _distributed = None

try:
    from jax._src.core import trace_state_clean
except ImportError:
    trace_state_clean = None


__all__ = [
    "CALLBACK_LOGGER",
    "CPU_THREADS_VARIABLE",
    "DETERMINISTIC",
    "ELEMENTWISE",
    "IDENTITIES",
    "ORBAX_DICT_KEY",
    "ORBAX_HANDLER",
    "ClosedJaxpr",
    "Coordination",
    "Jaxpr",
    "Literal",
    "Primitive",
    "Tracer",
    "array_in",
    "attribute_of",
    "bind",
    "branches",
    "call_by_num_devices",
    "call_with_buffers",
    "call_with_copies",
    "called_jaxpr",
    "coordination",
    "counts_elements",
    "cpu_client_threads",
    "deterministic_options",
    "has_backend",
    "has_buffer_callback",
    "has_explicit_axes_only",
    "is_in_callback",
    "is_in_transformation",
    "is_inside_lookahead",
    "is_inside_multi_steps",
    "is_params_placeholder",
    "is_single_step",
    "is_tracing",
    "key_name",
    "manual_axes",
    "mesh_in_use",
    "multi_steps_of",
    "path_keys",
    "path_text",
    "raise_in_callback",
    "register_checked",
    "register_with_flax",
    "select_primitive",
    "shard_map",
    "source_frames",
    "source_line",
    "static_params",
    "varies_between_runs",
    "without_examples",
    "without_library_reductions",
]

# ---- how a computation calls the host

CALLBACK_LOGGER = "jax._src.callback"
"""Logs an exception of a callback, with a traceback."""

# Modules with a function on the stack of a thread that runs a callback.
_CALLBACK_MODULES = frozenset(
    {"jax._src.callback", "jax._src.buffer_callback", "jaxinf.optimizer.callback"}
)

_TOLD = "is_told_by_jaxinf"


def raise_in_callback(error: BaseException) -> NoReturn:
    """Raises an exception that JAX's error quotes, so that JAX need not log it, too."""
    setattr(error, _TOLD, True)
    raise error.with_traceback(None)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not getattr(error, _TOLD, False)


logging.getLogger(CALLBACK_LOGGER).addFilter(_is_news)

CPU_THREADS_VARIABLE = "PJRT_NPROC"
"""The environment variable with the number of threads of XLA's CPU client."""


def has_buffer_callback() -> bool:
    """Whether this JAX can hand over its own buffers."""
    return buffer_callback is not None


def call_with_buffers(
    function: Callable[..., None],
    avals: Any,
    *arguments: Any,
) -> Any:
    """Calls ``function(context, outs, *arguments)`` with XLA's buffers; traceable.

    Args:
      function: fills `outs`; runs on the host, once.
      avals: shapes and dtypes of the results.
      arguments: arrays.
    """
    assert buffer_callback is not None, "has_buffer_callback was not asked"
    return buffer_callback(function, avals, has_side_effect=True)(*arguments)


def call_with_copies(
    function: Callable[..., Any],
    avals: Any,
    *arguments: Any,
) -> Any:
    """Calls ``function(*arguments)``, which returns the results; traceable."""
    return io_callback(function, avals, *arguments)


class Coordination:
    """The coordination service that `jax.distributed.initialize` has connected to.

    Its calls are host-side gRPC; all block, without the GIL. Thread-safe.

    Attributes:
      process: number of this process.
      num_processes: number of all processes.
    """

    def __init__(self, client: Any, process: int, num_processes: int) -> None:
        self._client = client
        self.process = process
        self.num_processes = num_processes

    def meet(self, name: str, timeout_s: float) -> list[str]:
        """Waits until all processes are in the barrier of a name, which is used once.

        Returns:
          The names of those that did not come in time; empty when all are there.
        """
        try:
            self._client.wait_at_barrier(name, max(1, round(1000 * timeout_s)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return missing_tasks(str(error)) or ["unknown"]
        return []

    def put(self, key: str, value: str) -> None:
        """Sets a key, once."""
        self._client.key_value_set(key, value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Waits for the value of a key; None if there is none in time."""
        try:
            milliseconds = max(1, round(1000 * timeout_s))
            return self._client.blocking_key_value_get(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def remove(self, folder: str) -> None:
        """Removes the keys below a name."""
        self._client.key_value_delete(f"{folder}/")

    def below(self, folder: str) -> dict[str, str]:
        """Returns the keys that begin with a name and a slash, with their values."""
        return dict(self._client.key_value_dir_get(f"{folder}/"))


def coordination() -> Coordination | None:
    """The service of this program; None in a program of one process.

    Raises:
      ImportError: this JAX has several processes, and no such service.
    """
    if _distributed is None:
        if has_backend() and jax.process_count() > 1:
            raise ImportError(
                "jax._src.distributed.global_state: expected the client of the "
                f"coordination service, found none in jax {jax.__version__}; use one "
                "of the versions of docs/dependencies.md"
            )
        return None
    client, count = _distributed.client, _distributed.num_processes
    if client is None or not count or count < 2:
        return None
    return Coordination(client, _distributed.process_id, count)


def missing_tasks(text: str) -> list[str]:
    """Returns the tasks that the error of a barrier names: numbers, or longer names."""
    _, _, names = text.partition("timed out task names:")
    lines = itertools.takewhile(str.strip, names.lstrip().splitlines())
    return [line.strip().rpartition(":")[2] for line in lines]


def has_backend() -> bool:
    """Whether this process has used JAX; True if JAX does not tell."""
    return backends_are_initialized is None or backends_are_initialized()


def is_in_callback(frame: FrameType | None) -> bool:
    """Whether a thread runs a callback, judged by its innermost frame."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _CALLBACK_MODULES:
            return True
        frame = frame.f_back
    return False


def cpu_client_threads() -> int:
    """Returns the requested threads of XLA's CPU client; 0 if the user set none."""
    setting = os.environ.get(CPU_THREADS_VARIABLE) or os.environ.get("NPROC") or "0"
    return int(setting) if setting.isdigit() else 0


def is_tracing() -> bool:
    """Whether JAX is tracing a function, so that even constants become tracers."""
    return isinstance(jax.numpy.zeros(()), Tracer)


def is_in_transformation() -> bool:
    """Whether JAX traces a function or runs it by `jax.grad`, `jax.vmap` and so on."""
    return is_tracing() if trace_state_clean is None else not trace_state_clean()


def shard_map(
    function: Callable[..., Any], *, mesh: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``jax.shard_map`` over all axes of `mesh`; replication is not checked."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def call_by_num_devices(
    one: Callable[..., Any],
    several: Callable[[AbstractMesh], Callable[..., Any]],
    *arguments: Any,
) -> Any:
    """Calls `one` in a computation on one device, or ``several(mesh)``; traceable.

    A trace does not tell how many devices the computation has. Its compilation does.

    Args:
      one: for one device.
      several: gives the function for a mesh of all devices; its results are
        replicated over them.
      arguments: arrays, or trees of arrays.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    closed, avals = jax.make_jaxpr(one, return_shape=True)(*arguments)

    def flat(mesh: AbstractMesh) -> Callable[..., list[Any]]:
        return lambda *xs: jax.tree.leaves(several(mesh)(*treedef.unflatten(xs)))

    results = _BY_NUM_DEVICES.bind(*leaves, closed=closed, several=flat)
    return jax.tree.structure(avals).unflatten(results)


def _lower_by_num_devices(
    context: Any, *values: Any, closed: ClosedJaxpr, several: Callable[..., Any]
) -> Any:
    where = context.module_context.axis_context
    num = where.num_devices if hasattr(where, "num_devices") else where.mesh.size
    if num == 1:
        function = jaxpr_as_fun(closed)
    else:
        mesh = jax.sharding.get_abstract_mesh()  # of jax.set_mesh
        if mesh.empty:
            mesh = AbstractMesh((num,), ("devices",))
        function = several(mesh)
    return mlir.lower_fun(function, multiple_results=True)(context, *values)


_BY_NUM_DEVICES = Primitive("by_num_devices")
_BY_NUM_DEVICES.multiple_results = True
_BY_NUM_DEVICES.def_impl(
    lambda *values, **params: jax.jit(lambda *xs: _BY_NUM_DEVICES.bind(*xs, **params))(
        *values
    )
)
_BY_NUM_DEVICES.def_effectful_abstract_eval(
    lambda *_, closed, **__: (list(closed.out_avals), closed.effects)
)
mlir.register_lowering(_BY_NUM_DEVICES, _lower_by_num_devices)


def mesh_in_use() -> Any:
    """The mesh of ``jax.set_mesh``, or before JAX 0.7 of ``jax.sharding.use_mesh``.

    It is empty if there is none.
    """
    if hasattr(jax.sharding, "get_mesh"):
        return jax.sharding.get_mesh()
    from jax._src.mesh import Mesh, get_concrete_mesh

    return get_concrete_mesh() or Mesh((), ())


def has_explicit_axes_only(mesh: Any) -> bool:
    """Whether the shardings over a mesh are part of types."""
    if hasattr(mesh, "are_all_axes_explicit"):
        return mesh.are_all_axes_explicit
    return mesh._are_all_axes_explicit  # before JAX 0.7


def manual_axes() -> dict[str, int]:
    """The axes, with sizes, of the ``pmap`` or ``shard_map`` that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in getattr(mesh, "manual_axes", ())}


def without_examples(
    values: Sequence[Any],
    *,
    refuse_examples: Callable[[int], NoReturn],
    refuse_derivative: Callable[[], NoReturn],
) -> list[Any]:
    """Returns arrays as they are, for a computation that knows no ``vmap``; traceable.

    Under a ``vmap`` over one example they lose that axis; JAX puts it back at the end.

    Args:
      values: arrays.
      refuse_examples: raises for the number of examples of another ``vmap``.
      refuse_derivative: raises where JAX differentiates with respect to an array.
    """
    return _WITHOUT_EXAMPLES.bind(
        *values, refuse_examples=refuse_examples, refuse_derivative=refuse_derivative
    )


_WITHOUT_EXAMPLES = Primitive("without_examples")
_WITHOUT_EXAMPLES.multiple_results = True
_WITHOUT_EXAMPLES.def_impl(lambda *values, **_: list(values))
_WITHOUT_EXAMPLES.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(_WITHOUT_EXAMPLES, lambda _context, *values, **_: values)


def _squeeze_examples(
    values: Sequence[Any], axes: Sequence[int | None], **refusals: Any
) -> tuple[list[Any], list[None]]:
    for value, axis in zip(values, axes, strict=True):
        if axis is not None and value.shape[axis] != 1:
            refusals["refuse_examples"](value.shape[axis])
    squeezed = [
        value if axis is None else jax.numpy.squeeze(value, axis)
        for value, axis in zip(values, axes, strict=True)
    ]
    return without_examples(squeezed, **refusals), [None] * len(values)


def _refuse_derivative(*_: Any, **refusals: Any) -> None:
    refusals["refuse_derivative"]()


batching.primitive_batchers[_WITHOUT_EXAMPLES] = _squeeze_examples
ad.primitive_jvps[_WITHOUT_EXAMPLES] = _refuse_derivative


# ---- compilation

_LIBRARY_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
_WITHOUT_REDUCTIONS = (
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
)

DETERMINISTIC = "xla_gpu_deterministic_ops"
"""An option of XLA's GPU compiler; with two hyphens a flag of ``XLA_FLAGS``."""


def without_library_reductions() -> dict[str, Any] | None:
    """Returns options for XLA's CPU compiler that keep reductions from YNNPACK.

    Products and convolutions go there, as by default. None if this XLA does not know
    the option, or if the user has set it in ``XLA_FLAGS``.
    """
    if _LIBRARY_FUSIONS in _xla_flags():
        return None
    options = {_LIBRARY_FUSIONS: _WITHOUT_REDUCTIONS}
    return options if _is_compiled_with(_LIBRARY_FUSIONS, _WITHOUT_REDUCTIONS) else None


def deterministic_options(is_wanted: bool) -> dict[str, Any] | None:
    """Returns options with which a program has the same bits in each run.

    They make a GPU add in a fixed order, and choose kernels without measuring them.
    None elsewhere, or if the user has chosen in ``XLA_FLAGS``.

    Args:
      is_wanted: Whether the program's bits matter.
    """
    return {DETERMINISTIC: True} if is_wanted and varies_between_runs() else None


def varies_between_runs() -> bool:
    """Whether a program may have other bits in each run if nobody asks for the same."""
    return jax.default_backend() == "gpu" and DETERMINISTIC not in _xla_flags()


def _xla_flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


@functools.cache
def _is_compiled_with(option: str, value: str) -> bool:
    """Whether XLA's compiler takes the option with this value."""
    lowered = jax.jit(lambda: jax.numpy.zeros(())).lower()
    try:
        lowered.compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


# ---- random numbers


def counts_elements(dtype: Any) -> bool:
    """Whether random bits under keys of this dtype are Threefry of the element's index.

    Args:
      dtype: dtype of a random key.
    """
    threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
    return dtype == threefry and jax.threefry_partitionable.value


# ---- jaxprs

ELEMENTWISE = frozenset(
    """
    abs add and cbrt ceil clamp convert_element_type cos div eq exp exp2 expm1 floor
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg
    nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt
    square sub tanh xor
    """.split()
)
"""Primitives by name: every operand leaf-shaped or a scalar. They name equations of
`jaxinf.program.ir`, too."""

IDENTITIES = frozenset(
    """
    copy copy_p stop_gradient optimization_barrier sharding_constraint reshape
    squeeze expand_dims broadcast_in_dim convert_element_type
    """.split()
)
"""Primitives that pass operands through, where no shape or dtype changes."""

_CALLS = frozenset(
    """
    jit pjit closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr remat remat2 checkpoint
    """.split()
)
_CHECKPOINTS = frozenset({"remat", "remat2", "checkpoint"})
_CALLEE_PARAMETERS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_REDUCED = {(8, 7): "bfloat16", (5, 10): "float16", (8, 23): "float32"}


def called_jaxpr(
    name: str, params: Mapping[str, Any], *, checkpoints: bool = True
) -> Any:
    """Returns the jaxpr of an equation that is only a call; None for other equations.

    Args:
      name: name of the equation's primitive.
      params: the equation's parameters.
      checkpoints: whether `jax.checkpoint` counts as a call, so that its recomputed
        equations need not stay together.
    """
    if name not in _CALLS or (name in _CHECKPOINTS and not checkpoints):
        return None
    return next(params[key] for key in _CALLEE_PARAMETERS if key in params)


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs of an equation's calls, loops and branches, closed or not."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, (ClosedJaxpr, Jaxpr)):
                yield one


def branches(name: str, params: Mapping[str, Any]) -> Sequence[Any] | None:
    """Returns the jaxprs of a conditional, chosen by its first operand; else None."""
    return params["branches"] if name == "cond" else None


def static_params(name: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the parameters that matter to a body; None if unsupported."""
    if name not in ELEMENTWISE:
        return None
    if name == "integer_pow":
        return {"y": int(params["y"])}
    if name == "round":
        return {"to_even": int(params["rounding_method"]) == 1}
    if name == "reduce_precision":
        bits = (int(params["exponent_bits"]), int(params["mantissa_bits"]))
        return {"to": _REDUCED[bits]} if bits in _REDUCED else None
    return {}


def select_primitive() -> Primitive:
    """The primitive of ``jax.lax.select_n``."""
    return jax.lax.select_n_p


def bind(
    primitive: Primitive,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    context: Any,
) -> Sequence[Any]:
    """Computes an equation; traceable.

    Args:
      primitive: the equation's primitive.
      operands: arrays or tracers.
      params: the equation's parameters, as in its jaxpr.
      context: the equation's ``ctx``; None if it has none.
    """
    given = primitive.get_bind_params(dict(params))
    if isinstance(given, tuple):  # before JAX 0.8, with the functions that it calls
        functions, params = given
        operands = (*functions, *operands)
    else:
        params = given
    if context is None:
        results = primitive.bind(*operands, **params)
    else:
        with context.manager:
            results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def source_frames(source: Any) -> list[tuple[str, str]]:
    """Returns file and function of each frame above an equation, if they were kept."""
    try:
        return [(f.file_name, f.function_name) for f in source.traceback.frames]
    except AttributeError:
        return []


# ---- trees


def source_line(eqn: Any) -> str:
    """The user's line that an equation comes from: ``file:line:column (function)``."""
    return source_info_util.summarize(eqn.source_info)


def key_name(key: Any) -> str:
    """Returns one entry of a key path as a string."""
    match key:
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case GetAttrKey():
            return key.name
        case SequenceKey():
            return str(key.idx)
    return str(key)


def path_keys(path: tuple[Any, ...]) -> tuple[tuple[str, Any], ...]:
    """Converts a key path to a `jaxinf.typing.KeyPath`, without JAX's classes."""
    return tuple(map(_kind_and_value, path))


def _kind_and_value(key: Any) -> tuple[str, Any]:
    match key:
        case DictKey() | FlattenedIndexKey():
            return "key", key.key
        case SequenceKey():
            return "key", key.idx
        case GetAttrKey():
            return "field", key.name
    return "other", str(key)


def register_checked(
    kind: type[tuple[Any, ...]],
    check: Callable[[], None],
    seen: Callable[[Any], None],
) -> None:
    """Registers a ``NamedTuple`` as a tree of its fields that JAX looks into with us.

    Args:
      kind: the class.
      check: is called each time that JAX flattens one, as each call of a jitted
        function does with its arguments; its exception is that call's.
      seen: gets one that a program, or a library that saves checkpoints for it,
        flattens with keys.
    """
    fields = kind._fields  # pyright: ignore[reportAttributeAccessIssue]
    keys = tuple(map(GetAttrKey, fields))

    def flatten_with_keys(value: tuple[Any, ...]) -> tuple[Any, None]:
        check()
        if _is_for_saving():
            seen(value)
        return tuple(zip(keys, value, strict=True)), None

    def flatten(value: tuple[Any, ...]) -> tuple[Any, None]:
        check()
        return tuple(value), None

    jax.tree_util.register_pytree_with_keys(
        kind, flatten_with_keys, lambda _, children: kind(*children), flatten
    )


def _is_for_saving() -> bool:
    """Whether a flattening with keys may be for a checkpoint, judged by its caller.

    JAX flattens so to name arguments in a trace, optax to find state by its name. NNX
    does at each call of a transformed function, and in ``nnx.state``, which counts.
    """
    frame, within = sys._getframe(2), ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("flax.nnx."):
            within = frame.f_code.co_name
        elif within:
            return within == "state"
        elif not module.startswith(("jax._src.tree_util", "jax.tree")):
            return not module.startswith(("jax._src.", "optax.", "chex."))
        frame = frame.f_back
    return False


def array_in(value: Any) -> Any:
    """Returns an array, or the one in an NNX variable; None for anything else."""
    value = value.get_value() if hasattr(value, "get_value") else value
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    return None if isinstance(value, Tracer) or not is_array else value


def attribute_of(key: Any) -> str | None:
    """Returns the attribute that an entry of a key path names; None for other keys."""
    return key.name if isinstance(key, GetAttrKey) else None


def path_text(path: tuple[Any, ...]) -> str:
    """Returns a key path as JAX prints it, e.g. ``[0].mu['w']``."""
    return keystr(path)


# ---- optax


def is_inside_multi_steps() -> bool:
    """Whether a method of an ``optax.MultiSteps`` is among the callers."""
    return any(isinstance(f.f_locals.get("self"), optax.MultiSteps) for f in _callers())


def is_inside_lookahead() -> bool:
    """Whether a function of an ``optax.lookahead`` is among the callers."""
    return any(
        f.f_globals.get("__name__") == optax.lookahead.__module__ for f in _callers()
    )


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def multi_steps_of(tx: Any) -> Any:
    """Returns the ``optax.MultiSteps`` that a transformation is, or is made by."""
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    found = owner if isinstance(owner, optax.MultiSteps) else tx
    return found if isinstance(found, optax.MultiSteps) else None


def is_single_step(tx: Any) -> bool:
    """Whether a transformation is ``MultiSteps(inner, 1)`` and skips no step."""
    steps = multi_steps_of(tx)
    if steps is None:
        return False
    every = getattr(steps, "_every_k_schedule", None)
    skips = getattr(steps, "_should_skip_update_fn", None)
    own = [getattr(f, "__qualname__", "") for f in (every, skips)]
    if not all(name.startswith("MultiSteps.__init__.<locals>.") for name in own):
        return False
    assert callable(every), "it has a qualified name"
    return inspect.getclosurevars(every).nonlocals == {"every_k_schedule": 1}


def is_params_placeholder(params: Any) -> bool:
    """Whether params are what ``optax.tree.map_params`` gives to an ``init``."""
    kind = type(params)
    return kind.__name__ == "_ParamsPlaceholder" and kind.__module__[:5] == "optax"


# ---- Flax


def register_with_flax(
    node: type, owner: type[tuple[Any, ...]], seen: Callable[[Any], None]
) -> None:
    """Lets Flax's serialization pass over nodes of a tree that have no arrays.

    Nothing is done, and Flax is not imported, where a program does not use it.

    Args:
      node: the class of the nodes.
      owner: a ``NamedTuple`` that has such nodes. Flax calls none of ours for it.
      seen: gets one that Flax serializes.
    """
    flax = sys.modules.get("flax.serialization")
    if flax is None:
        return

    def serialized(node: Any) -> dict[str, Any]:
        del node
        found = _in_callers(owner, "flax.")
        if found is not None:
            seen(found)
        return {}

    flax.register_serialization_state(
        node, serialized, lambda node, state: node, override=True
    )


def _in_callers(kind: type, module: str) -> Any:
    """Returns a local value of a type in the nearest callers, all in one library."""
    frame = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(module):
        for value in frame.f_locals.values():
            if isinstance(value, kind):
                return value
        frame = frame.f_back
    return None


# ---- Orbax

ORBAX_HANDLER = (
    "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
)
"""Orbax's handler of a pytree, as a checkpoint's metadata names it."""

ORBAX_DICT_KEY = 2
"""``KeyType.DICT`` of Orbax's metadata of trees."""
