"""The optax state of the last step as a tree, and a tree as a step of the store.

Invariant: one array is in memory at a time, and a load is one commit: until then the
store is at step 0.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.documents import first_few
from jaxinf.engine.carry import array_like, data_of
from jaxinf.engine.engine import Engine
from jaxinf.engine.reading import read_leaf
from jaxinf.engine.resume_check import RESTART
from jaxinf.engine.sharding import shards_with_origin
from jaxinf.engine.store_files import StoreFiles
from jaxinf.engine.subgroup_table import SubgroupLayout
from jaxinf.errors import StoreMismatchError
from jaxinf.program import StateLayout, state_keys
from jaxinf.store import ScalarState
from jaxinf.transfer import Task
from jaxinf.typing import AVERAGE, FLOAT32, FLOAT_DTYPES, Array, PyTree

_OF_AVERAGE = (AVERAGE, "average_count", "average_weight")
"""The state of an average, whose first scalars are zeros."""


class _Place(NamedTuple):
    """The place of a leaf of the optax state in a store.

    Attributes:
      leaf: number of the params' leaf; None for scalar state.
      number: number of the leaf's state, or of the scalar.
      shape, dtype: of the array; typed keys are their numbers.
    """

    name: str
    leaf: int | None
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype


def read_state(files: StoreFiles, layout: StateLayout, like: PyTree) -> PyTree:
    """Returns the last step's optax state in the form of a tree; blocks."""
    scalars = files.finished.scalar_state
    leaves = [
        array_like(scalars[place.number].value, leaf)
        if place.leaf is None
        else read_leaf(files, place.leaf, leaf, place.number)
        for place, leaf in _placed_leaves(files, layout, like, "like").items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def load_step(engine: Engine, params: Sequence[Any], state: PyTree, step: int) -> None:
    """Commits params and an optax state as the first step after step 0; blocks.

    All processes call it. After an exception the step may be loaded anew.

    Args:
      params: leaves of the store's shapes, of 16 or 32 bits.
    """
    what, group, layout = f"load of step {step}", engine.group, engine.layout
    steps, files = engine.steps, engine.files

    def write() -> None:
        steps.begin_overwrite()
        for leaf, number, array in stored:
            for origin, values in _parts(files, array):
                _write_part(files, leaf, number, origin, values)
                del values  # frees a deferred leaf before the next is read
            files.mover.drain()

    with engine.guard, steps.paused():
        if files.is_new or files.finished.step:
            raise StoreMismatchError(
                f"{files.options.path}: load: expected a store at step 0, found step "
                f"{files.finished.step}; load into a new store after tx.init(params), "
                f"{RESTART}"
            )
        steps.abandon()
        given = partial(_given, files, layout, params, state)
        stored, scalars = group.in_all(what, given)
        try:
            group.in_all(what, write)
        except BaseException:  # perhaps of another process
            files.mover.drain()
            files.chunks.forget_step()
            raise
        steps.commit_written_step(step, scalars)


# --- places of the optax state --------------------------------------------------------


def _placed_leaves(
    files: StoreFiles, layout: StateLayout, state: PyTree, what: str
) -> dict[_Place, Any]:
    """Returns each leaf of an optax state by its place.

    Names of keys alone count, so dicts and lists may take the place of named tuples.
    """
    places = {place.name: place for place in _places(files, layout)}
    names = map(_name, state_keys(state))
    leaves = dict(zip(names, jax.tree.leaves(state), strict=True))
    where = f"{files.options.path}: {what}"
    unknown = [name for name in leaves if name not in places]
    missing = [name for name in places if name not in leaves]
    missing = [name for name in missing if name.split("/")[0] not in _OF_AVERAGE]
    if unknown or missing:
        raise StoreMismatchError(
            f"{where}: expected a tree like the init of the store's optimizer for the "
            f"params that are trained; unknown leaves: {first_few(unknown)}; missing "
            f"ones: {first_few(missing)}. Make one with the init of the optax "
            "transformation that smart_update was given"
        )
    for name, leaf in leaves.items():
        shape, expected = data_of(leaf).shape, places[name].shape
        if shape != expected:
            raise StoreMismatchError(
                f"{where}: leaf {name}: expected shape {expected}, found {shape}; give "
                "the state of these params"
            )
    return {places[name]: leaf for name, leaf in leaves.items()}


def _places(files: StoreFiles, layout: StateLayout) -> Iterator[_Place]:
    scalars = zip(layout.scalar_indices, files.finished.scalar_state, strict=True)
    for number, (index, held) in enumerate(scalars):
        value, name = held.value, _name(layout.keys[index])
        yield _Place(name, None, number, value.shape, value.dtype)
    for leaf, slots in enumerate(layout.slots):
        record = files.leaves[leaf]
        names = [state.name for state in record.states]
        for slot in slots:
            name, number = _name(layout.keys[slot.state_index]), names.index(slot.name)
            yield _Place(name, leaf, number, record.shape, slot.dtype)


def _name(keys: Sequence[tuple[str, Any]]) -> str:
    return "/".join(str(value) for _, value in keys)


# --- a tree as a step -----------------------------------------------------------------


def _given(
    files: StoreFiles, layout: StateLayout, params: Sequence[Any], state: PyTree
) -> tuple[list[tuple[int, int, Any]], list[ScalarState]]:
    """Returns arrays by leaf and number of the state, and scalars; reads these alone.

    An average that is not given begins as a copy of the params.
    """
    placed = _placed_leaves(files, layout, state, "opt_state")
    stored = [(number, 0, leaf) for number, leaf in enumerate(params)]
    scalars = list(files.finished.scalar_state)
    for place in _places(files, layout):
        if place not in placed:
            if place.leaf is not None:
                stored.append((place.leaf, place.number, params[place.leaf]))
            continue
        leaf = data_of(placed[place])
        found, expected = np.dtype(leaf.dtype), place.dtype
        is_narrow = expected == FLOAT32 and found in FLOAT_DTYPES
        if found != expected and not is_narrow:  # it would not hold it exactly
            raise StoreMismatchError(
                f"{files.options.path}: opt_state: leaf {place.name}: expected "
                f"{expected}, found {found}; cast it first"
            )
        if place.leaf is not None:
            stored.append((place.leaf, place.number, leaf))
        else:
            path = scalars[place.number].path
            scalars[place.number] = ScalarState.of(path, np.array(leaf, expected))
    return stored, scalars


def _parts(files: StoreFiles, array: Any) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yields origin and values of the whole array, or of this process's shards."""
    shards = shards_with_origin(np.asarray(array) if files.group.is_alone else array)
    while shards:
        yield shards.pop()


def _write_part(
    files: StoreFiles, leaf: int, state: int, origin: Sequence[int], values: Array
) -> None:
    """Writes a box of a leaf's state; blocks until it is in buffers.

    Decoded values get their codes again.
    """
    record = files.leaves[leaf].states[state]
    stores = tuple(range(state, state + len(record.stored)))

    def compute(
        layout: SubgroupLayout, csd: Csd, buffer: CsdBuffer, _: Collection[int]
    ) -> None:
        own = layout.gather(values, origin)
        for number, one in zip(stores, record.encode(own, None), strict=True):
            csd.put(buffer, layout.extents[number], one)
        files.meters.add(link_down_bytes=own.nbytes)

    layouts = files.subgroups.layouts(leaf, origin, values.shape)
    files.mover.run([Task(x, partial(compute, x), stores=stores) for x in layouts])
