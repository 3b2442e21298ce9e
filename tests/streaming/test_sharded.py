"""Streaming on four devices: as on one, shard by shard.

The programs are functions of `tests/programs/streaming_sharded.py`.
"""

import pytest
from cases import Cases

FOUR = "--xla_force_host_platform_device_count=4"
LONG = pytest.mark.long
OTHER_KINDS = [pytest.param(n, marks=LONG) for n in ("specs", "shard_map", "jit")]


@pytest.fixture(scope="module")
def process():
    cases = Cases("programs/streaming_sharded.py", XLA_FLAGS=FOUR)
    yield cases
    cases.close()


@pytest.fixture
def on_four(process, place):
    """Runs a function with four CPU devices and a place for stores."""
    return lambda function, *arguments: process.run(function, place, *arguments)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["explicit", "named", *OTHER_KINDS])
def test_training_is_that_of_one_device(kind, on_four):
    on_four("training", kind)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["tied_and_unused", "linen_scan", "scan_nested", "scan_twice_cast", "moe_map"],
)
def test_programs_of_the_zoo(name, on_four):
    on_four("zoo", name)


@pytest.mark.long
def test_params_are_made_by_an_init_function(on_four):
    on_four("initialised")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "clipped",
        "ratios",
        "parts",
        "typed_parts",
        "weighed",
        "rewritten",
        "compressed",
        "bf16",
    ],
)
def test_options_are_as_on_one_device(name, on_four):
    on_four("options", name)


def test_replicas_share_the_memory_that_was_read_into(on_four):
    on_four("replicas")


@pytest.mark.long
def test_the_smallest_device_counts(on_four):
    on_four("other_sizes")


@pytest.mark.long
def test_functions_without_a_gradient(on_four):
    on_four("function")


@pytest.mark.long
def test_other_devices_are_refused_until_the_plan_is_replaced(on_four):
    on_four("other_devices")


@pytest.mark.long
def test_what_is_refused_on_several_devices(on_four):
    on_four("refused")
