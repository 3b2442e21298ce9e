"""Moves in any order of their ends: room of each tier, and what comes back."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinf.streaming.move.moves import Moves, Tensor

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)
LARGEST = 5


class Memory:
    def __init__(self, world, num_bytes):
        self._world, self._num_bytes = world, num_bytes
        world.read_bytes += num_bytes

    def release(self):
        self._world.read_bytes -= self._num_bytes


class World:
    """Runs moves; which of those that are under way ends next is up to the test."""

    def __init__(self, **options):
        self.under_way, self.started = [], []
        self.read_bytes = 0
        self.moves = Moves(self.start, self.allocate, **options)

    def start(self, tensor, kind, part):
        self.under_way.append((tensor, kind))
        self.started.append((tensor.key, kind))

    def allocate(self, tensor):
        return Memory(self, tensor.host_bytes)

    def end(self, choose, error=None):
        tensor, kind = self.under_way.pop(choose(len(self.under_way)))
        self.moves.ended(tensor, kind, f"{kind} {tensor.key}", error)

    def until(self, choose, is_done):
        while not is_done():
            assert self.under_way, "it waits for something"
            self.end(choose)


@st.composite
def choices(draw):
    """Returns a function that chooses one of so many moves."""
    random = draw(st.randoms(use_true_random=False))
    return random.randrange


def on_way(world):
    """Memory of the host for tensors on their way to drives."""
    moving = world.moves.tensors.values()
    begun = {key for key, kind in world.started if kind == "out"}
    return sum(t.way_bytes for t in moving if t.key in begun and not t.is_written)


@given(SIZES, choices(), st.integers(LARGEST, 12), st.integers(LARGEST, 12))
def test_tensors_leave_and_come_back_within_the_hosts_room(
    sizes, choose, way_bytes, read_bytes
):
    world = World(has_link=True, way_bytes=way_bytes, read_bytes=read_bytes)
    moves, keys = world.moves, range(len(sizes))
    moves.clear(keys)
    tensors = [Tensor(k, 1, sizes[k], sizes[k], value="there") for k in keys]
    for tensor in tensors:
        moves.evict(tensor)
    for tensor in tensors:
        while not moves.is_evicted(tensor):
            assert on_way(world) <= way_bytes
            assert world.read_bytes <= read_bytes
            world.end(choose)
    for tensor in tensors:
        moves.prefetch(tensor)
        world.until(choose, lambda tensor=tensor: tensor.is_ready)
        assert tensor.value == f"back {tensor.key}"
        assert world.read_bytes <= read_bytes
        world.until(choose, lambda tensor=tensor: not tensor.num_moves)
        moves.release(tensor)
    assert not moves.tensors
    assert not world.read_bytes
    outs = [key for key, kind in world.started if kind == "out"]
    assert outs == list(keys)


@given(SIZES, choices(), st.integers(2 * LARGEST, 16), st.booleans(), st.data())
def test_tensors_are_loaded_in_order_within_their_room(
    sizes, choose, room, has_link, data
):
    """Each waits for the one before; some are held on the host a while."""
    world = World(has_link=has_link, read_bytes=room, device_bytes=room)
    moves = world.moves
    held = data.draw(st.sets(st.sampled_from(range(len(sizes))), max_size=1))
    tensors = [
        Tensor(
            key,
            1,
            size,
            device_bytes=size if has_link else 0,
            is_held=key in held,
        )
        for key, size in enumerate(sizes)
    ]
    moves.load(tensors)
    for number, tensor in enumerate(tensors):
        world.until(choose, lambda tensor=tensor: tensor.is_ready)
        assert world.read_bytes <= room
        here = [t for t in tensors if t.is_back and not t.is_over]
        assert sum(t.device_bytes for t in here) <= room
        moves.release(tensor)
        if number and number - 1 in held:
            moves.free(tensors[number - 1])
    if len(sizes) - 1 in held:
        assert world.read_bytes == sizes[-1]
        moves.free(tensors[-1])
    assert not moves.tensors
    assert not world.read_bytes
    reads = [key for key, kind in world.started if kind == "read"]
    assert reads == list(range(len(sizes)))


@given(SIZES, choices(), st.booleans())
def test_a_step_that_is_given_up_leaves_what_is_held(sizes, choose, has_link):
    world = World(has_link=has_link, read_bytes=100, device_bytes=100)
    tensors = [Tensor(k, 1, size, is_held=True) for k, size in enumerate(sizes)]
    world.moves.load(tensors)
    world.until(choose, lambda: tensors[0].is_back)
    world.under_way.clear()
    world.moves.clear()
    held = [tensor for tensor in tensors if tensor.is_back]
    assert [*world.moves.tensors.values()] == held
    assert world.read_bytes == sum(tensor.host_bytes for tensor in held)
    for tensor in held:
        world.moves.free(tensor)
    assert not world.read_bytes


@given(choices())
def test_an_error_is_of_the_tensor_that_is_read_or_of_all_if_it_is_written(choose):
    world = World(has_link=False)
    one, other = (Tensor(key, 1, 1, value=key) for key in range(2))
    world.moves.evict(one)
    world.end(choose)
    world.moves.prefetch(one)
    world.end(choose, OSError("read"))
    assert str(one.error) == "read"
    assert world.moves.error is None
    assert not world.read_bytes
    world.moves.evict(other)
    world.end(choose, OSError("full"))
    assert str(world.moves.error) == "full"


@given(SIZES, choices(), st.data())
def test_a_tensor_that_cannot_be_read_gives_its_room_back(sizes, choose, data):
    world = World(has_link=True, read_bytes=LARGEST, device_bytes=LARGEST)
    bad = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    tensors = [Tensor(k, 1, size, device_bytes=size) for k, size in enumerate(sizes)]
    world.moves.load([*tensors, Tensor("last", 1, LARGEST, device_bytes=LARGEST)])
    for tensor in tensors:
        while not tensor.is_ready:
            assert world.under_way, "it waits for something"
            place = choose(len(world.under_way))
            found, kind = world.under_way[place]
            is_failed = kind == "read" and found.key in bad
            world.end(lambda _, n=place: n, OSError("read") if is_failed else None)
        assert (tensor.error is not None) == (tensor.key in bad)
        world.moves.release(tensor)
    [last] = world.moves.tensors.values()
    world.until(choose, lambda: last.is_ready)
