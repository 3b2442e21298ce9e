"""Drives a store like a training run, without JAX and with known numbers.

The optimizer is SGD with learning rate 1/2 and momentum 1/2 on a gradient of ones. Each
step rounds once, as the expected numbers here do. Every kind of CSD has a kernel for
it.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import optax
import small_stores
from raw_stores import chunk_file, decoded, flip_bit

import jaxinf
from jaxinf.engine import (
    InitialParams,
    UpdateRequest,
    bind_optimizer,
    describe_store,
    engine_of,
    initialise_leaves,
)
from jaxinf.layout.codecs import encode_split
from jaxinf.program import LeafInputs, trace_init, trace_update
from jaxinf.store import (
    CommitRecord,
    CommittedStep,
    ScalarState,
    StepReader,
    StoreDirectory,
)

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((40, 1025), "float32"),
    "empty": ((0, 7), "float32"),
    "half": ((33, 257), "bfloat16"),
    "scale": ((), "float32"),
}
RATE = np.float32(0.5)
TX = optax.sgd(0.5, momentum=0.5)


def described(params, tx=TX):
    """Makes the description that `smart_update` would give a store."""
    init, update = trace_init(tx, params), trace_update(tx, params, {})
    counts = [(1,) * len(leaf.info.shape) for leaf in update.leaves]
    return replace(describe_store(update, init, counts), scalar_paths=("#0/.n",))


class Driver:
    """A run: `init`, then `step` after `step`; `expected` is that of the default `tx`.

    CSD roots are made beside the store; the `csd` is by default JAXINF_TEST_CSD.
    """

    def __init__(self, path, leaves=LEAVES, tx=TX, num_csds=0, **options):
        self.leaves = dict(sorted(leaves.items()))
        params = {}
        for name, (shape, dtype) in self.leaves.items():
            size = int(np.prod(shape))
            values = np.arange(size, dtype=np.float32) % 256  # exact in bfloat16
            params[name] = values.reshape(shape).astype(jaxinf.store.dtype_of(dtype))
        self.initial = params
        self._known = 0, self._first()
        self.description = described(params, tx)
        options.setdefault("csd", os.environ.get("JAXINF_TEST_CSD", "host"))
        if num_csds:
            options["csds"] = [Path(path).parent / f"csd{n}" for n in range(num_csds)]
            for root in options["csds"]:
                root.mkdir(exist_ok=True)
        self.store = small_stores.open_store(path, **options)
        self.at = 0
        self.carry = None  # by step, what a step carries

    @property
    def engine(self):
        return engine_of(self.store)

    @property
    def files(self):
        return self.engine.files

    def init(self):
        """Like `tx.init`: makes the store, or resumes an existing one."""
        self._known = 0, self._first()  # a test may have changed the initial params
        is_new = bind_optimizer(self.engine, self.description, may_create=True)
        if is_new:
            for number, params in enumerate(self.initial.values()):
                origin, inputs = (0,) * params.ndim, LeafInputs()
                given = InitialParams(number, params, origin, inputs)
                initialise_leaves(self.engine.files, self.description, [given])
            self.engine.steps.commit_written_step(0, self.scalars(0))
        self.at = self.store.step
        if not is_new:
            self.engine.resume_check.expected_step = None
            self.compare_params(self.at)
        return self

    def compare_params(self, step):
        """Like the first `tx.update`: compares the run's params with the store's."""
        self.engine.resume_check.begin(step)
        for number, (params, *_) in enumerate(self.expected(step).values()):
            device = self.rounded(number, params)
            self.engine.resume_check.compare(number, device, (0,) * device.ndim)
        self.engine.resume_check.finish()
        self.at = self.store.step
        return self

    def rounded(self, number, master):
        """Returns the params on the JAX device for master params."""
        leaf = self.description.leaves[number]
        rounded = master.astype(leaf.device_dtype)
        if self.files.directory.manifest.leaves[number].states[0].codec == "split":
            rest = np.empty(master.size, np.int16)
            encode_split(master.reshape(-1), rounded.reshape(-1), rest)
        return rounded

    def scalars(self, step):
        return [ScalarState.of("#0/.n", np.array(step, np.int32))]

    def part(self, number, gradient=1.0):
        """Makes a callback's request for a leaf at the present step."""
        leaf = self.description.leaves[number]
        params, *_ = self.expected(self.at)[list(self.leaves)[number]]
        shape = leaf.record.shape
        num_probed = min(8, shape[-1]) if shape else 1
        probe = self.rounded(number, params).reshape(-1)[:num_probed]
        return UpdateRequest(
            leaf=number,
            kernel=leaf.kernel,
            origin=(0,) * len(shape),
            gradient=np.full(shape, gradient, leaf.device_dtype),
            inputs=LeafInputs(),
            out=np.empty(shape, leaf.device_dtype),
            probe=probe,
        )

    def update(self, order=None, gradient=1.0):
        names = list(self.leaves)
        results = {}
        for number in range(len(names)) if order is None else order:
            part = self.part(number, gradient)
            self.engine.steps.update(self.at, part)
            results[names[number]] = part.out
        return results

    def finish(self, skipped_steps=0):
        carry = {} if self.carry is None else self.carry(self.at + 1)
        self.engine.steps.finish(
            self.at, self.scalars(self.at + 1), skipped_steps, carry=carry
        )
        self.at += 1

    def step(self, order=None):
        results = self.update(order)
        self.finish()
        return results

    def durable_step(self):
        self.step()
        self.store.wait()

    def steps(self, num_steps):
        for _ in range(num_steps):
            self.step()
        return self

    def expected(self, step):
        """Returns master params and momentum by leaf after a number of steps."""
        at, states = self._known
        if step < at:
            at, states = 0, self._first()
        for _ in range(at, step):
            for name, (master, momentum) in states.items():
                new = 1 + RATE * momentum
                states[name] = (master - RATE * new, new)
        self._known = step, states
        return dict(states)

    def _first(self):
        wide = {name: p.astype(np.float32) for name, p in self.initial.items()}
        return {name: (p, np.zeros_like(p)) for name, p in wide.items()}

    def found(self, path=None):
        """Reads and decodes the same from a slot, by default the committed one."""
        path = self.store.path / "current" if path is None else path
        directory = self.files.directory
        places = [path] * len(directory.csd_directories)
        if path.is_relative_to(self.store.path):
            places = directory.chunk_roots(directory.place_of(path))
        record = CommitRecord.read(path / "commit.json")
        step = CommittedStep(path, directory.manifest, record, tuple(places))
        with StepReader(step) as reader:
            return {
                record.name: tuple(
                    decoded(reader, record, state)
                    for state in record.states
                    if not state.is_companion
                )
                for record in self.files.directory.manifest.leaves
            }

    def check(self, step, path=None):
        self.store.wait()
        for name, arrays in self.found(path).items():
            for held, wanted in zip(arrays, self.expected(step)[name], strict=True):
                np.testing.assert_array_equal(held, wanted, err_msg=name)

    def close(self):
        self.store.close()


def flip(driver, leaf, state, byte=0, chunk=0):
    """Flips one bit of a committed chunk; returns its file."""
    number = list(driver.leaves).index(leaf)
    directory = StoreDirectory.open(driver.store.path)
    file = chunk_file(directory, directory.committed_slot(), number, state, chunk)
    flip_bit(file, byte)
    return file
