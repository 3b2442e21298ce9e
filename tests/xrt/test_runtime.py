"""Kernels run on the real runtime: numbers, devices, buffers, runs in flight."""

import numpy as np
import pytest
from xrt_card import fetch, finish, float_bits, put_back, start, view

F32 = np.float32
MEBI = 1 << 20


def scaled(card, values, *, factor=2.5, offset=-3):
    source, target = card.put(values), card.buffer(values.nbytes)
    arguments = (source, target, len(values), float_bits(factor), offset)
    finish(start(card.kernel("scale"), *arguments))
    return fetch(target)


@pytest.mark.parametrize("num_elements", [1, 1023, 1024, 1025, 1 << 20])
def test_buffers_and_scalars(open_card, num_elements):
    values = np.arange(num_elements, dtype=F32)
    wanted = F32(2.5) * values + F32(-3)
    np.testing.assert_array_equal(scaled(open_card(), values), wanted)


def adam_on_host(values, rate, corrections):
    params, mu, nu, gradient = values
    mu[:] = F32(0.9) * mu + (F32(1) - F32(0.9)) * gradient
    nu[:] = F32(0.999) * nu + (F32(1) - F32(0.999)) * (gradient * gradient)
    root = np.sqrt(nu * corrections[1]) + F32(1e-8)
    params -= rate * (mu * corrections[0] / root)


def test_adam_gives_the_bits_of_numpy(open_card):
    card, generator = open_card(), np.random.default_rng(0)
    num_words, rate = 5000, F32(1e-3)
    host = [generator.normal(size=num_words * 16).astype(F32) for _ in range(4)]
    host[1][:], host[2][:] = 0, 0
    device = [card.put(values) for values in host]
    kernel = card.kernel("adam")
    for step in range(1, 4):
        host[3] = generator.normal(size=num_words * 16).astype(F32)
        put_back(device[3], host[3])
        corrections = [F32(1 / (1 - beta**step)) for beta in (0.9, 0.999)]
        bits = [float_bits(value) for value in (rate, *corrections)]
        finish(start(kernel, *device, num_words, *bits))
        adam_on_host(host, rate, corrections)
    for values, buffer in zip(host[:3], device[:3], strict=True):
        np.testing.assert_array_equal(fetch(buffer).view("i4"), values.view("i4"))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_devices_are_apart(open_card, num_devices):
    cards = [open_card(index) for index in range(num_devices)]
    sources = [card.put(np.full(4096, n, F32)) for n, card in enumerate(cards)]
    targets = [card.buffer(4096 * 4) for card in cards]
    assert {buffer.address() for buffer in sources} == {sources[0].address()}
    runs = [
        start(card.kernel("scale"), source, target, 4096, float_bits(1), n)
        for n, (card, source, target) in enumerate(
            zip(cards, sources, targets, strict=True)
        )
    ]
    for n, (run, target) in enumerate(zip(runs, targets, strict=True)):
        finish(run)
        np.testing.assert_array_equal(fetch(target), 2 * n)


def test_two_runs_of_one_device_are_in_flight_at_once(open_card):
    card = open_card()
    counter, kernel = card.put(np.zeros(1024, np.int32)), card.kernel("meet")
    runs = [start(kernel, counter, 2) for _ in range(2)]  # neither ends alone
    for run in runs:
        finish(run)
    assert fetch(counter, np.int32)[0] == 2


def test_a_run_can_be_started_again(open_card):
    card = open_card()
    source, target = card.put(np.ones(16, F32)), card.buffer(64)
    run = start(card.kernel("scale"), source, target, 16, float_bits(1), 0)
    for offset in range(5):
        finish(run)
        np.testing.assert_array_equal(fetch(target), 1 + max(offset - 1, 0))
        run.set_arg(4, offset)
        run.start()
    finish(run)


def test_sub_buffers(open_card):
    import pyxrt  # pyright: ignore[reportMissingImports]

    card = open_card()
    whole = card.put(np.arange(4096, dtype=F32))
    first, last = pyxrt.bo(whole, 4096, 0), pyxrt.bo(whole, 4096, 3 * 4096)
    assert last.address() == whole.address() + 3 * 4096
    kernel = card.kernel("scale")
    finish(start(kernel, first, last, 1024, float_bits(1), 1))
    wanted = np.arange(4096, dtype=F32)
    wanted[3072:] = wanted[:1024] + 1
    np.testing.assert_array_equal(fetch(whole), wanted)
    np.testing.assert_array_equal(view(last), wanted[3072:])
    with pytest.raises(RuntimeError, match="Invalid argument"):
        pyxrt.bo(whole, 4096, 4 * 4096)


def test_a_buffer_of_many_messages(open_card):
    card = open_card()  # a buffer does not keep its device open
    values = np.random.default_rng(0).integers(0, 255, 40 * MEBI, np.uint8)
    buffer = card.put(values)
    np.testing.assert_array_equal(fetch(buffer, np.uint8), values)
    np.testing.assert_array_equal(buffer.read(1000, 77).view(np.uint8), values[77:1077])


def test_memory_is_given_back(open_card):
    card = open_card()
    for number in range(12):  # of 512 MiB each; the card has 2 GiB
        buffer = card.buffer(512 * MEBI)
        assert view(buffer)[-1] == 0  # of another buffer, once
        view(buffer)[-1] = number
        del buffer
    with pytest.raises(MemoryError):
        card.buffer(3 << 30)
