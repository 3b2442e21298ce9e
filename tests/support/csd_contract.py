"""The contract of every kind of CSD: the host's bits, errors and behaviour.

A test file runs it on its kinds: it imports everything here, and defines a fixture
`spec`, a `jaxinf.csd.CsdSpec` of a kind whose cards have kernels for `CASES`.
"""

import threading
from dataclasses import dataclass, field, replace
from itertools import product

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from families import family

from jaxinf.compress import SparseGradient
from jaxinf.csd import (
    Extent,
    GradientForm,
    KernelNeed,
    Rounding,
    Transfer,
    Update,
    initialise_states,
    open_csds,
    parse_csd,
)
from jaxinf.errors import StoreIOError
from jaxinf.layout import CODE_BLOCK
from jaxinf.program import LeafInputs, trace_init, trace_update
from jaxinf.transfer import ByteMeters, allocate_file, crc32c

PAGE = 4096
MEMORY_BYTES = 4 << 20
HOST = parse_csd("host")


@dataclass(frozen=True)
class Case:
    name: str = "sgd_momentum"
    dtype: type = np.float32
    codec: str = ""
    tx: optax.GradientTransformation = field(
        default_factory=lambda: optax.sgd(0.5, momentum=0.5)
    )

    def __str__(self):
        codec = f"-{self.codec}" if self.codec else ""
        return f"{self.name}-{np.dtype(self.dtype).name}{codec}"


SIMPLE = Case()
ADAMW = Case("adamw", tx=optax.adamw(1e-2))
CASES = [
    SIMPLE,
    ADAMW,
    replace(ADAMW, dtype=ml_dtypes.bfloat16),
    replace(ADAMW, dtype=np.float16, codec="int8"),
    replace(ADAMW, codec="bf16"),
    replace(ADAMW, codec="int8"),
    Case("lion", tx=optax.lion(1e-2), codec="int8"),
    Case("adagrad", tx=optax.adagrad(1e-1)),
    Case("rmsprop", tx=optax.rmsprop(1e-2), codec="int8"),
]


def _extents(case, kernel, num_elements, first=0):
    """Lays out params and slots like the engine, in files that start at `first`."""
    extents, offset = [], 0

    def add(dtype, count, start, codec=""):
        nonlocal offset
        dtype = np.dtype(dtype)
        extents.append(Extent(dtype, count, start * dtype.itemsize, offset, codec))
        offset += -(-count * dtype.itemsize // PAGE) * PAGE

    add(np.float32, num_elements, first)
    coded = {"": np.float32, "bf16": ml_dtypes.bfloat16, "int8": np.uint8}[case.codec]
    for _ in kernel.slots:
        add(coded, num_elements, first, case.codec)
        if case.codec == "int8":
            blocks = -(-num_elements // CODE_BLOCK)
            add(np.float32, blocks, first // CODE_BLOCK, "scale")
    return extents, offset


def open_fleet(text, roots, memory_bytes=1 << 20):
    spec = parse_csd(text)
    return open_csds(spec, roots, memory_bytes=memory_bytes, meters=ByteMeters())


class Chunk:
    def __init__(self, spec, root, case=SIMPLE, num_elements=5000, tail=None):
        self.case, self.num_elements = case, num_elements
        params = {"w": jnp.ones((8,), case.dtype), "v": jnp.ones((8,), case.dtype)}
        self.init = trace_init(case.tx, params).leaves[0].kernel
        self.program = trace_update(case.tx, params, {})
        self.kernel = self.program.leaves[0].kernel
        self.extents, num_bytes = _extents(case, self.kernel, num_elements)
        self.meters = ByteMeters()
        root.mkdir(parents=True, exist_ok=True)
        self.fleet = open_csds(
            spec, [root], memory_bytes=MEMORY_BYTES, meters=self.meters
        )
        codecs = ("", *[case.codec] * len(self.kernel.slots))
        dtype = np.dtype(case.dtype)
        need = KernelNeed("w", self.kernel, codecs, dtype, (GradientForm(dtype),))
        self.fleet.check([need])
        self.fleet.check_buffer(num_bytes, num_elements)
        (self.csd,) = self.fleet.attach([root], num_bytes, num_elements)
        self.files = [root / f"state{n}" for n in range(len(self.extents))]
        for file, extent in zip(self.files, self.extents, strict=True):
            pages = -(-extent.num_bytes // PAGE) * PAGE
            length = pages if tail is None else extent.num_bytes
            allocate_file(file, length, length)
        self.num_bytes = num_bytes
        self.buffer = self.acquire()

    def acquire(self):
        buffer = self.csd.acquire(self.num_bytes)
        assert buffer is not None
        return buffer

    def initialise(self, seed=0):
        params = np.random.default_rng(seed).standard_normal(self.num_elements)
        params = params.astype(self.case.dtype)
        initialise_states(
            self.csd, self.buffer, self.extents,
            kernel=self.init, params=params, inputs=LeafInputs(), rounding=ROUNDING,
        )  # fmt: skip
        return self

    def write(self):
        for extent, file in zip(self.extents, self.files, strict=True):
            self.csd.write([Transfer(self.buffer, extent, file)])

    def read(self):
        for extent, file in zip(self.extents, self.files, strict=True):
            self.csd.read([Transfer(self.buffer, extent, file)])

    def checksums(self):
        return [self.csd.checksum(self.buffer, extent) for extent in self.extents]

    def states(self):
        return [self.csd.view(self.buffer, e).copy() for e in self.extents]

    def update(self, step=1, gradient=None, scalars=None, *, wants=True):
        if gradient is None:
            rng = np.random.default_rng([step, 7])
            gradient = rng.standard_normal(self.num_elements)
        if not isinstance(gradient, SparseGradient):
            gradient = gradient.astype(self.case.dtype)
        if scalars is None:
            scalars = [
                np.array(1.25 + step / 8, dtype) for dtype in self.kernel.scalar_dtypes
            ]
        out = np.empty(self.num_elements, self.case.dtype) if wants else None
        outcome = self.csd.update(
            self.buffer,
            Update(
                self.extents, self.kernel, gradient, LeafInputs(tuple(scalars)), out,
                Rounding(0x9ABCDEF0 + step, 0),
                wanted_checksums=range(len(self.extents)),
            ),
        )  # fmt: skip
        return outcome, out

    def close(self):
        self.buffer.release()
        assert self.csd.memory.used_bytes == 0
        self.fleet.close()


ROUNDING = Rounding(0xFEDCBA98, 0)


@pytest.fixture
def chunks(spec, tmp_path):
    """Makes a chunk on the tested kind, and the same one on the host."""
    made = []

    def make(*arguments, **options):
        for name, kind in (("tested", spec), ("host", HOST)):
            root = tmp_path / f"{name}{len(made)}"
            made.append(Chunk(kind, root, *arguments, **options))
        return made[-2:]

    yield make
    for chunk in made:
        chunk.close()


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


ROWS = list(product(CASES, [1, 255, 1023, 1024, 1025, 4097, 40_000]))
SHORT = [(case, num) for case, num in ROWS if num == 1025 or case is SIMPLE]


@pytest.mark.parametrize(("case", "num_elements"), family(ROWS, short=SHORT), ids=str)
def test_steps_have_the_hosts_bits(chunks, case, num_elements):
    both = chunks(case, num_elements)
    for chunk in both:
        chunk.initialise().write()
    for step in range(1, 4):
        results = []
        for chunk in both:
            chunk.read()
            outcome, out = chunk.update(step)
            assert outcome.is_finite
            chunk.write()
            results.append([out, *chunk.states()])
        assert_same(*results)
    pages = sum(-(-e.num_bytes // PAGE) * PAGE for e in both[0].extents)
    for chunk in both:
        counts = chunk.meters.snapshot()
        assert counts.drive_read_bytes == 3 * pages
        assert counts.drive_write_bytes == 4 * pages
    contents = [[np.fromfile(f, np.uint8) for f in c.files] for c in both]
    for tested, host, extent in zip(*contents, both[0].extents, strict=True):
        np.testing.assert_array_equal(
            tested[: extent.num_bytes], host[: extent.num_bytes]
        )


@pytest.mark.parametrize("num_elements", [1000, 40_000])
@pytest.mark.parametrize("case", [SIMPLE, ADAMW, CASES[5]], ids=str)
def test_a_result_that_nobody_wants_changes_no_state(chunks, case, num_elements):
    results = []
    for wants, chunk in enumerate(chunks(case, num_elements)):
        chunk.initialise()
        for step in (1, 2):
            outcome, _ = chunk.update(step, wants=bool(wants))
        results.append([outcome.is_finite, chunk.checksums(), *chunk.states()])
    (_, *tested), (is_finite, *host) = results
    assert is_finite
    assert tested[0] == host[0]
    assert_same(tested[1:], host[1:])


def test_checksums_are_of_what_was_read_and_written(chunks):
    for chunk in chunks(ADAMW):
        chunk.initialise()
        first = [crc32c(state) for state in chunk.states()]
        assert chunk.checksums() == first
        chunk.write()
        chunk.read()
        asked = chunk.checksums()  # known here, or by the update
        outcome, _ = chunk.update()
        told = [
            outcome.read_checksums.get(number) if found is None else found
            for number, found in enumerate(asked)
        ]
        assert told == first
        after = [crc32c(state) for state in chunk.states()]
        assert chunk.checksums() == after
        assert not set(after) & set(first)


@pytest.mark.parametrize("num_selected", [0, 1, 17, 4097])
def test_sparse_gradients_are_dense_ones_with_zeros(chunks, num_selected):
    tested, host = chunks(num_elements=4097)
    for chunk in (tested, host):
        chunk.initialise()
    rng = np.random.default_rng(num_selected)
    indices = np.sort(rng.choice(4097, num_selected, replace=False)).astype(np.int32)
    values = rng.standard_normal(num_selected).astype(np.float32)
    dense = np.zeros(4097, np.float32)
    dense[indices] = values
    sparse = SparseGradient(indices, values, 4097)
    outcome, out = tested.update(gradient=sparse)
    assert outcome.is_finite
    _, wanted = host.update(gradient=dense)
    assert_same([out, *tested.states()], [wanted, *host.states()])
    if num_selected:
        values[-1] = np.inf
        assert not tested.update(gradient=sparse)[0].is_finite


@pytest.mark.parametrize(
    ("place", "value"), [(0, np.nan), (2500, np.inf), (4999, -np.inf)]
)
def test_non_finite_gradients_are_seen(chunks, place, value):
    for chunk in chunks():
        chunk.initialise()
        gradient = np.zeros(5000)
        assert chunk.update(gradient=gradient)[0].is_finite
        gradient[place] = value
        assert not chunk.update(gradient=gradient)[0].is_finite


@pytest.mark.parametrize("bits", [1, 0x80000001, 0xBF000000, 0xFFFFFFFF, 0x3F800000])
def test_scalars_of_every_bit(chunks, bits):
    """Includes bits of no float, and words beyond an int's 31 bits."""
    results = []
    for chunk in chunks(ADAMW):
        chunk.initialise()
        count = len(chunk.kernel.scalar_dtypes)
        assert count
        scalars = np.full(count, bits, np.uint32).view(np.float32)
        outcome, out = chunk.update(scalars=list(scalars))
        assert outcome.is_finite
        results.append([np.nan_to_num(out), *map(np.nan_to_num, chunk.states())])
    assert_same(*results)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_idle_kernels_leave_state_as_it_is(chunks, dtype):
    case = Case("frozen", dtype, tx=optax.set_to_zero())
    results = []
    for chunk in chunks(case):
        chunk.initialise().write()
        chunk.read()
        before = chunk.states()
        (asked,) = chunk.checksums()
        outcome, out = chunk.update()
        told = outcome.read_checksums.get(0) if asked is None else asked
        assert told == crc32c(before[0])
        assert_same(chunk.states(), before)
        results.append([out])
        assert not chunk.update(gradient=np.full(5000, np.nan))[0].is_finite
    assert_same(*results)


@pytest.mark.parametrize("num_elements", [1, 300])
def test_files_shorter_than_a_page(chunks, num_elements):
    """Leaves without dimensions have files of one element."""
    results = []
    for chunk in chunks(num_elements=num_elements, tail=0):
        chunk.initialise().write()
        wanted = chunk.states()
        assert [f.stat().st_size for f in chunk.files] == [4 * num_elements] * 2
        chunk.update()
        chunk.read()
        assert_same(chunk.states(), wanted)
        results.append(wanted)
    assert_same(*results)


def test_parts_of_a_chunk(chunks):
    """A subgroup that starts within its files, in a buffer that others have used."""
    for chunk in chunks(num_elements=3 * PAGE):
        chunk.initialise().write()
        whole = chunk.states()
        extents, _ = _extents(chunk.case, chunk.kernel, PAGE, first=PAGE)
        chunk.buffer.release()
        chunk.buffer = chunk.acquire()
        for extent, file, state in zip(extents, chunk.files, whole, strict=True):
            chunk.csd.read([Transfer(chunk.buffer, extent, file)])
            view = chunk.csd.view(chunk.buffer, extent)
            np.testing.assert_array_equal(view, state[PAGE : 2 * PAGE])


def test_several_at_once(chunks):
    """Buffers are independent, and so are updates of several threads."""
    tested, host = chunks(num_elements=20_000)
    host.initialise().write()
    wanted = {step: (host.read(), host.update(step), host.states()) for step in (1, 2)}
    tested.initialise().write()
    second = Chunk.__new__(Chunk)
    vars(second).update(vars(tested))
    second.buffer = tested.acquire()
    found = {}

    def work(chunk, step):
        for _ in range(5):
            chunk.read()
            outcome, out = chunk.update(step)
            found[step] = outcome, out, chunk.states()

    pairs = [(tested, 1), (second, 2)]
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, (outcome, out, states) in found.items():
        _, (_, wanted_out), wanted_states = wanted[step]
        assert outcome.is_finite
        assert_same([out, *states], [wanted_out, *wanted_states])
    assert len(found) == 2
    second.buffer.release()


def test_a_buffer_is_not_waited_for_and_comes_back(chunks):
    tested, _ = chunks(num_elements=100_000)
    taken = []
    while (buffer := tested.csd.acquire(tested.num_bytes)) is not None:
        taken.append(buffer)
        assert len(taken) < 100
    assert tested.csd.memory.used_bytes >= (1 + len(taken)) * tested.num_bytes
    assert tested.csd.memory.used_bytes <= MEMORY_BYTES
    for buffer in taken:
        buffer.release()
        buffer.release()
    assert tested.fleet.peak_bytes > tested.csd.memory.used_bytes
    again = tested.acquire()
    again.release()


def test_errors_name_the_file(chunks):
    messages = []
    for chunk in chunks():
        chunk.initialise()
        chunk.files[0].unlink()
        with pytest.raises(StoreIOError, match="state0: read at byte 0 failed") as read:
            chunk.read()
        with pytest.raises(StoreIOError, match="state0: write at byte 0") as write:
            chunk.write()
        with open(chunk.files[1], "r+b") as file:
            file.truncate(100)
        transfer = Transfer(chunk.buffer, chunk.extents[1], chunk.files[1])
        with pytest.raises(StoreIOError, match="state1: truncated") as short:
            chunk.csd.read([transfer])
        errors = [str(e.value) for e in (read, write, short)]
        messages.append([e.replace(str(chunk.files[0].parent), "") for e in errors])
        allocate_file(chunk.files[0], PAGE * 5, PAGE * 5)
    assert messages[0] == messages[1]
