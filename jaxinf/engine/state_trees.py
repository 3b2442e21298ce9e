"""Reads the optax state of the last step as a tree, and loads a tree as a step.

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
from jaxinf.engine.carry import numeric_data, put_like
from jaxinf.engine.engine import Engine
from jaxinf.engine.reading import read_leaf
from jaxinf.engine.resume_check import RESTART_REMEDY
from jaxinf.engine.sharding import shards_with_origin
from jaxinf.engine.store_files import StoreFiles
from jaxinf.engine.subgroup_table import SubgroupLayout
from jaxinf.errors import StoreMismatchError
from jaxinf.program import StateLayout, state_keys
from jaxinf.store import ScalarState
from jaxinf.transfer import Task
from jaxinf.typing import AVERAGE, FLOAT32, FLOAT_DTYPES, Array, PyTree

_AVERAGE_STATES = (AVERAGE, "average_count", "average_weight")
"""The states of an average, whose first scalars are zeros."""


class _Place(NamedTuple):
    """The place of an optax state's leaf in a store.

    Attributes:
      leaf: Number of the params' leaf; None for scalar state.
      number: Number of the leaf's state, or of the scalar.
      shape, dtype: Those of the array; of typed keys, those of their numbers.
    """

    name: str
    leaf: int | None
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype


def read_state(files: StoreFiles, layout: StateLayout, like: PyTree) -> PyTree:
    """Returns the last step's optax state as a tree like `like`; blocks."""
    scalars = files.finished.scalar_state
    leaves = [
        put_like(scalars[place.number].value, leaf)
        if place.leaf is None
        else read_leaf(files, place.leaf, leaf, place.number)
        for place, leaf in _match_leaves(files, layout, like, "like").items()
        if leaf is not None
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def load_step(
    engine: Engine, params: Sequence[Any], state: PyTree, *, step: int
) -> None:
    """Commits params and an optax state as the first step after step 0; blocks.

    All processes call it. After an exception the step may be loaded anew.
    """
    what, group, layout = f"load of step {step}", engine.group, engine.layout
    steps, files = engine.steps, engine.files

    def write() -> None:
        steps.begin_overwrite()
        for leaf, number, array in arrays:
            shards = shards_with_origin(np.asarray(array) if group.is_alone else array)
            while shards:  # no other reference, as a deferred leaf may follow
                _write_shard(files, *shards.pop(), leaf=leaf, state=number)
            files.mover.drain()

    with engine.binding_lock, steps.paused():
        if files.is_new or files.finished.step:
            raise StoreMismatchError(
                f"{files.options.path}: load: expected a store at step 0, found step "
                f"{files.finished.step}; load into a new store after tx.init(params), "
                f"{RESTART_REMEDY}"
            )
        steps.abandon()
        match = partial(_match_states, files, layout, params, state)
        arrays, scalars = group.in_all(what, match)
        try:
            group.in_all(what, write)
        except BaseException:  # perhaps of another process
            files.mover.drain()
            files.chunks.forget_step()
            raise
        steps.commit_written_step(step, scalars)


def _match_leaves(
    files: StoreFiles, layout: StateLayout, state: PyTree, what: str
) -> dict[_Place, Any]:
    """Returns each leaf of an optax state by its place; None for an absent average.

    Only the names of keys count: dicts and lists may take the place of named tuples.
    """
    places = {place.name: place for place in _places(files, layout)}
    names = map(_joined_keys, state_keys(state))
    leaves = dict(zip(names, jax.tree.leaves(state), strict=True))
    where = f"{files.options.path}: {what}"
    unknown = [name for name in leaves if name not in places]
    absent = [name for name in places if name not in leaves]
    missing = [name for name in absent if name.split("/")[0] not in _AVERAGE_STATES]
    if unknown or missing:
        raise StoreMismatchError(
            f"{where}: expected a tree like the init of the store's optimizer for the "
            f"params that are trained; unknown leaves: {first_few(unknown)}; missing "
            f"ones: {first_few(missing)}. Make one with the init of the optax "
            "transformation that smart_update was given"
        )
    for name, leaf in leaves.items():
        shape, expected = numeric_data(leaf).shape, places[name].shape
        if shape != expected:
            raise StoreMismatchError(
                f"{where}: leaf {name}: expected shape {expected}, found {shape}; give "
                "the state of these params"
            )
    return {places[name]: leaves.get(name) for name in (*leaves, *absent)}


def _places(files: StoreFiles, layout: StateLayout) -> Iterator[_Place]:
    scalars = zip(layout.scalar_indices, files.finished.scalar_state, strict=True)
    for number, (index, scalar) in enumerate(scalars):
        value, name = scalar.value, _joined_keys(layout.keys[index])
        yield _Place(name, None, number, value.shape, value.dtype)
    for leaf, slots in enumerate(layout.slots):
        record = files.leaves[leaf]
        numbers = {state.name: number for number, state in enumerate(record.states)}
        for slot in slots:
            name = _joined_keys(layout.keys[slot.state_index])
            yield _Place(name, leaf, numbers[slot.name], record.shape, slot.dtype)


def _joined_keys(keys: Sequence[tuple[str, Any]]) -> str:
    return "/".join(str(value) for _, value in keys)


def _match_states(
    files: StoreFiles, layout: StateLayout, params: Sequence[Any], state: PyTree
) -> tuple[list[tuple[int, int, Any]], list[ScalarState]]:
    """Returns the arrays to store, by leaf and number of the state, and the scalars.

    Of the arrays nothing is read. An absent average begins as a copy of the params.
    """
    arrays = [(number, 0, leaf) for number, leaf in enumerate(params)]
    scalars = list(files.finished.scalar_state)
    for place, leaf in _match_leaves(files, layout, state, "opt_state").items():
        if leaf is None:
            if place.leaf is not None:
                arrays.append((place.leaf, place.number, params[place.leaf]))
            continue
        data = numeric_data(leaf)
        dtype, expected = np.dtype(data.dtype), place.dtype
        is_exact = dtype == expected or (expected == FLOAT32 and dtype in FLOAT_DTYPES)
        if not is_exact:
            raise StoreMismatchError(
                f"{files.options.path}: opt_state: leaf {place.name}: expected "
                f"{expected}, found {dtype}; cast it first"
            )
        if place.leaf is not None:
            arrays.append((place.leaf, place.number, data))
        else:
            path = scalars[place.number].path
            scalars[place.number] = ScalarState.of(path, np.array(data, expected))
    return arrays, scalars


def _write_shard(
    files: StoreFiles, origin: Sequence[int], values: Array, *, leaf: int, state: int
) -> None:
    """Encodes and writes a shard of a leaf's state; blocks until it is in buffers."""
    record = files.leaves[leaf].states[state]
    stores = tuple(range(state, state + len(record.stored)))

    def compute(
        layout: SubgroupLayout, csd: Csd, buffer: CsdBuffer, _: Collection[int]
    ) -> None:
        decoded = layout.gather(values, origin)
        for number, array in zip(stores, record.encode(decoded, None), strict=True):
            csd.put(buffer, layout.extents[number], array)
        files.meters.add(link_down_bytes=decoded.nbytes)

    layouts = files.subgroups.layouts(leaf, origin, values.shape)
    files.mover.run([Task(x, partial(compute, x), stores=stores) for x in layouts])
