"""Trees in memory as a step of the store, and the reverse.

They are the optax state, and arrays that a caller gives a step to commit with it.
Invariant: one array is in memory at a time, and a load is one commit: until then the
store is at step 0. All steps of a process carry arrays of the same names, shapes and
dtypes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.reading import read_leaf
from jaxinf.engine.shape import SubgroupLayout
from jaxinf.engine.sharding import distinct_shards
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import CodedSlot
from jaxinf.program import StateLayout, key_data, leaf_path, state_keys
from jaxinf.store import (
    CARRY,
    CarriedArray,
    ScalarState,
    check_carry,
    dtype_of,
    read_carry,
)
from jaxinf.transfer import Task
from jaxinf.typing import (
    AVERAGE,
    AVERAGE_SCALARS,
    FLOAT32,
    FLOAT_DTYPES,
    Array,
    PyTree,
)

if TYPE_CHECKING:  # which loads by these functions
    from jaxinf.engine.engine import Engine

_PIECE_ELEMENTS = 1 << 16
_OF_AVERAGE = (AVERAGE, *(name for name, _ in AVERAGE_SCALARS))
_OF_NUMPY = (bool, int, float, np.ndarray, np.generic)


class _Place(NamedTuple):
    """The place of a leaf of the optax state in a store.

    Attributes:
      name: names of its keys joined by ``/``.
      leaf: number of the params' leaf; None for scalar state.
      number: number of the leaf's state, or of the scalar.
      shape, dtype: of the array; typed keys are their numbers.
    """

    name: str
    leaf: int | None
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype


def read_state(opened: OpenStore, layout: StateLayout, like: PyTree) -> PyTree:
    """Returns the last step's optax state in the form of a tree; blocks."""
    scalars = opened.finished.scalar_state
    leaves = [
        _scalar_array(scalars[place.number].value, leaf)
        if place.leaf is None
        else read_leaf(opened, place.leaf, leaf, place.number)
        for place, leaf in _placed_leaves(opened, layout, like, "like").items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def load_step(
    opened: OpenStore,
    layout: StateLayout,
    params: Sequence[Any],
    state: PyTree,
    step: int,
) -> None:
    """Commits params and an optax state as a step; all processes call it; blocks.

    After an exception the step may be loaded anew.

    Args:
      params: leaves of the store's shapes, of 16 or 32 bits.

    Raises:
      StoreMismatchError: a tree is another, or a leaf has another shape or dtype.
      ProcessError: another process failed.
    """
    what, group = f"load of step {step}", opened.group
    stored, scalars = group.in_all(what, lambda: _given(opened, layout, params, state))

    def write() -> None:
        opened.begin_load()
        for leaf, number, array in stored:
            for origin, values in _parts(opened, leaf, array):
                _write_part(opened, leaf, number, origin, [values])
                del values  # frees a deferred leaf before the next is read
            opened.mover.drain()

    try:
        group.in_all(what, write)
    except BaseException:  # perhaps of another process
        opened.mover.drain()
        opened.chunks.forget_step()
        raise
    opened.commit_given(step, scalars)


# --- the optax state -----------------------------------------------------------------


def _placed_leaves(
    opened: OpenStore, layout: StateLayout, state: PyTree, what: str
) -> dict[_Place, Any]:
    """Returns each leaf of an optax state by its place.

    Names of keys alone count, so dicts and lists may take the place of named tuples.
    """
    places = {place.name: place for place in _places(opened, layout)}
    names = map(_name, state_keys(state))
    leaves = dict(zip(names, jax.tree.leaves(state), strict=True))
    where = f"{opened.options.path}: {what}"
    unknown = [name for name in leaves if name not in places]
    missing = [n for n in places if n not in leaves and not _is_of_average(n)]
    if unknown or missing:
        raise StoreMismatchError(
            f"{where}: expected a tree like the init of the store's optimizer for the "
            f"params that are trained; unknown leaves: {_some(unknown)}; missing ones: "
            f"{_some(missing)}. Make one with the init of the optax transformation "
            "that smart_update was given"
        )
    found = {places[name]: leaf for name, leaf in leaves.items()}
    for place, leaf in found.items():
        shape = _data_of(leaf).shape
        if shape != place.shape:
            raise StoreMismatchError(
                f"{where}: leaf {place.name}: expected shape {place.shape}, found "
                f"{shape}; give the state of these params"
            )
    return found


def _places(opened: OpenStore, layout: StateLayout) -> Iterator[_Place]:
    scalars = zip(layout.scalar_indices, opened.finished.scalar_state, strict=True)
    for number, (index, held) in enumerate(scalars):
        value, name = held.value, _name(layout.keys[index])
        yield _Place(name, None, number, value.shape, value.dtype)
    for leaf, slots in enumerate(layout.slots):
        record = opened.directory.manifest.leaves[leaf]
        names = [state.name for state in record.states]
        for slot in slots:
            name, number = _name(layout.keys[slot.state_index]), names.index(slot.name)
            yield _Place(name, leaf, number, record.shape, slot.dtype)


def _given(
    opened: OpenStore, layout: StateLayout, params: Sequence[Any], state: PyTree
) -> tuple[list[tuple[int, int, Any]], list[ScalarState]]:
    """Returns arrays by leaf and number of the state, and scalars; reads these alone.

    An average that is not given begins as a copy of the params.
    """
    placed = _placed_leaves(opened, layout, state, "opt_state")
    stored = [(number, 0, leaf) for number, leaf in enumerate(params)]
    scalars = list(opened.finished.scalar_state)
    for place in _places(opened, layout):
        if place not in placed:
            if place.leaf is not None:
                stored.append((place.leaf, place.number, params[place.leaf]))
            continue
        leaf = _data_of(placed[place])
        found, expected = np.dtype(leaf.dtype), place.dtype
        is_narrow = expected == FLOAT32 and found in FLOAT_DTYPES
        if found != expected and not is_narrow:  # it would not hold it exactly
            raise StoreMismatchError(
                f"{opened.options.path}: opt_state: leaf {place.name}: expected "
                f"{expected}, found {found}; cast it first"
            )
        if place.leaf is not None:
            stored.append((place.leaf, place.number, leaf))
        else:
            path = scalars[place.number].path
            scalars[place.number] = ScalarState.of(path, np.array(leaf, expected))
    return stored, scalars


def _parts(
    opened: OpenStore, leaf: int, array: Any
) -> Iterator[tuple[list[int], Array]]:
    """Yields origin and values of each shard, or of the leaf if chunks are cut."""
    shards = [
        ([s.start or 0 for s in index], values)
        for index, values in distinct_shards(array)
    ]
    is_fit = all(opened.divides(leaf, o, v.shape) for o, v in shards)
    if not is_fit and opened.group.is_alone:
        values = np.asarray(array)
        shards = [([0] * values.ndim, values)]
    while shards:
        origin, values = shards.pop()
        yield origin, values


def _write_part(
    opened: OpenStore, leaf: int, state: int, origin: Sequence[int], held: list[Array]
) -> None:
    """Writes a box of a leaf's state; blocks until it is in buffers.

    Args:
      held: the values alone; taken away, as a worker keeps its last task.
    """
    record = opened.directory.manifest.leaves[leaf].states[state]
    stores = (state, state + 1) if record.codec in ("int8", "split") else (state,)

    def task(layout: SubgroupLayout) -> Task:
        def compute(csd: Csd, buffer: CsdBuffer, _: Collection[int]) -> None:
            values = layout.gather(held[0], origin)
            arrays = _encoded(layout, stores, record.codec, values)
            for number, one in zip(stores, arrays, strict=True):
                csd.put(buffer, layout.extents[number], one)
            opened.meters.add(link_down_bytes=values.nbytes)

        return Task(layout, compute, stores=stores)

    opened.mover.run([task(x) for x in opened.layouts(leaf, origin, held[0].shape)])
    held.clear()


def _encoded(
    layout: SubgroupLayout, stores: Sequence[int], codec: str, values: Array
) -> list[Array]:
    """Returns values in the store's form; decoded ones get their codes again."""
    extents = [layout.extents[number] for number in stores]
    if not codec:
        return [np.ascontiguousarray(values, extents[0].dtype)]
    arrays = [np.empty(extent.num_elements, extent.dtype) for extent in extents]
    slot = CodedSlot(*arrays, key=None)
    for start in range(0, values.size, _PIECE_ELEMENTS):
        stop = min(start + _PIECE_ELEMENTS, values.size)
        slot.part(start, stop).encode(values[start:stop].astype(np.float32))
    return arrays


# --- what a step carries --------------------------------------------------------------


def carried_leaves(tree: PyTree, what: str = CARRY) -> dict[tuple[str, ...], Any]:
    """Returns a tree's arrays by their paths, typed keys as numbers; traceable.

    Args:
      what: name of the tree, for messages.

    Raises:
      TypeError: a leaf is no array of numbers; names it.
      ValueError: two leaves have one path.
    """
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = leaf_path(keys)
        where = "/".join((what, *path))
        if isinstance(leaf, _OF_NUMPY):
            leaf = jnp.asarray(leaf)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{where}: expected an array or a number, found "
                f"{type(leaf).__name__}; leave it out of the tree"
            )
        data = _data_of(leaf)
        dtype = np.dtype(data.dtype)
        if dtype.kind not in "biuf" and dtype.name != "bfloat16":
            raise TypeError(
                f"{where}: expected real numbers, bools or typed keys, found "
                f"{dtype.name}; carry it in another dtype"
            )
        if path in found:
            raise ValueError(f"{where}: expected one leaf of this name, found two")
        found[path] = data
    return found


def check_carried(
    engine: "Engine", carried: Mapping[tuple[str, ...], Any], states: Iterable[str]
) -> None:
    """Refuses what a step cannot carry, or what other steps do not.

    Args:
      carried: as `carried_leaves` returns; nothing but shapes and dtypes is read.
      states: names of the store's states.

    Raises:
      ValueError: says why.
    """
    form = _form(carried)
    where = f"{engine.options.path}: carry"
    try:
        check_carry(form)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if form and CARRY in states:
        raise ValueError(
            f"{where}: expected no state of the optimizer of this name, found one, "
            "whose files it would share; rename that field"
        )
    if engine.carried not in (None, form):
        raise ValueError(
            f"{where}: expected the arrays of the steps before, "
            f"{_shown(engine.carried or ())}, found {_shown(form)}; give every step "
            "the same, or close the store and open it again"
        )
    engine.carried = form


def read_carried(opened: OpenStore, like: PyTree) -> PyTree:
    """Returns what the committed step carries, in the form of a tree; blocks.

    Nothing may be committed meanwhile.
    """
    step = opened.directory.step_path(opened.chunks.committed)
    carry, wanted = opened.commit.carry, carried_leaves(like, "like")
    where = f"{opened.options.path}: carried: step {opened.commit.step}"
    if not carry:
        raise StoreMismatchError(
            f"{where}: expected arrays that it carries, found none; give them to each "
            "step, tx.update(grads, state, params, carry=tree), or jaxinf.stream(…, "
            "carry=fn), and read them if store.step is not 0"
        )
    held = tuple(CarriedArray(x.path, x.shape, x.dtype, "") for x in carry)
    if {*held} != {*_form(wanted)}:
        raise StoreMismatchError(
            f"{where}: expected a tree `like` of its arrays, {_shown(held)}, found "
            f"{_shown(_form(wanted))}; give the tree that update was given"
        )
    values = {
        one.path: np.frombuffer(raw, dtype_of(one.dtype)).reshape(one.shape)
        for one, raw in zip(carry, read_carry(step, carry), strict=True)
    }
    leaves, treedef = jax.tree.flatten(like)
    return treedef.unflatten(
        [
            _scalar_array(values[path], leaf if hasattr(leaf, "dtype") else data)
            for (path, data), leaf in zip(wanted.items(), leaves, strict=True)
        ]
    )


def _form(carried: Mapping[tuple[str, ...], Any]) -> tuple[CarriedArray, ...]:
    return tuple(
        CarriedArray(path, tuple(x.shape), np.dtype(x.dtype).name, "")
        for path, x in carried.items()
    )


def _shown(form: Iterable[CarriedArray]) -> str:
    return _some(["/".join(x.path) + f" {x.dtype}{list(x.shape)}" for x in form])


# --- leaves ---------------------------------------------------------------------------


def _scalar_array(value: Array, like: Any) -> jax.Array:
    """Returns an array of the store in the form of `like`, and in its place."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        impls: list[Any] = []  # of a shape it is known while tracing alone
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
        return jax.random.wrap_key_data(jnp.asarray(value), impl=impls[0])
    sharding = getattr(like, "sharding", None)
    if not getattr(like, "committed", True):
        sharding = None
    return jax.device_put(np.asarray(value, like.dtype), sharding)


def _data_of(leaf: Any) -> Any:
    """A leaf as an array or a shape, without reading it; typed keys as numbers."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(key_data, leaf)
    return key_data(leaf) if hasattr(leaf, "dtype") else np.asarray(leaf)


def _name(keys: Sequence[tuple[str, Any]]) -> str:
    return "/".join(str(value) for _, value in keys)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "none") + more


def _is_of_average(name: str) -> bool:
    return name.split("/")[0] in _OF_AVERAGE
