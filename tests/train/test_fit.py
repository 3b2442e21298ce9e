"""`jaxinf plan --fit`: the fastest of what is tried, within every limit."""

import dataclasses
import json
import math
import shlex

import pytest

from jaxinf.cli import main
from jaxinf.command_line import parse
from jaxinf.plan import Rate, read_machine, write_machine
from jaxinf.train.__main__ import main as train_main
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.fit import Search, first_way, limits_of
from jaxinf.train.loading import load, make_batches
from jaxinf.train.loop import plan_run

MIB = 1 << 20


def of(value):
    return Rate(value, "this test", "measured")


@pytest.fixture
def machine(tmp_path):
    """Writes a CPU with two drives; returns its file."""
    workstation = read_machine("workstation")

    def write(*, drive=1e6, update=1e18, product=1e18, memory=1 << 34, device=None):
        drives = dataclasses.replace(
            workstation.drives[0], count=2, mixed=of(drive), endurance=of(1e12)
        )
        updates = {f"adamw {state}": of(update) for state in ("fp32", "int8")}
        found = dataclasses.replace(
            workstation,
            num_cores=1,
            memory=of(memory),
            device=device,
            drives=(drives,),
            products={"float32": of(product)},
            updates=updates,
            **dict.fromkeys(("launches", "calls", "moves")),
        )
        write_machine(tmp_path / "machine.json", found)
        return tmp_path / "machine.json"

    return write


@pytest.fixture
def asked(text, tiny):
    """Parses a run's flags; returns a search for its settings, and the limits."""

    def make(*words, years=None, allowed=(), batch_size=1):
        line = ["--data", text, "--batch-size", batch_size, "--seq-len", 8, *words]
        config = parse(TrainConfig, [str(word) for word in line], prog="test")
        run, limits = limits_of(config, years, allowed)
        loaded, data = load(first_way(run, limits))
        return Search(loaded, run, make_batches(loaded, data)[0]), limits

    with tiny():
        yield make


def parsed(command):
    """The run that a command line means, as the trainer reads it."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "jaxinf.train"]
    return check(parse(TrainConfig, words[3:], prog="test"))


ROOTS = ("--csd-root", "/mnt/a b", "--csd-root", "/mnt/c")


@pytest.mark.long
@pytest.mark.parametrize(
    ("rates", "words", "options"),
    [
        ({"product": 1e4}, ROOTS, {"years": 1e-3, "allowed": ("state",)}),
        pytest.param(
            *({"product": 1e4}, ("--store", "kept"), {"allowed": ("param-dtype",)}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *({"memory": 3 * MIB}, ("--mode", "stream"), {"batch_size": 2}),
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_fastest_of_all_that_fit_and_its_command(
    rates, words, options, machine, asked
):
    search, limits = asked("--machine", machine(**rates), *words, **options)
    best, tried = search.fit(limits).best, search.candidates(limits)
    assert len(tried) > 5
    fitting = [
        one
        for one in tried
        if one.host_bytes <= limits.memory_bytes
        and (one.found.years or math.inf) >= (limits.years or 0)
    ]
    fastest = min(one.found.step_s for one in fitting)
    # A search begins with sketches, which may be slower than the plan.
    assert best.found.step_s <= fastest * 1.001
    assert best.config in [one.config for one in fitting]
    # The command is that run, and its own plan says the same.
    assert parsed(best.command) == dataclasses.replace(best.config, files=None)
    planned = plan_run(parsed(best.command)).found
    assert planned.step_s == pytest.approx(best.found.step_s)
    assert planned.years == best.found.years
    for one in tried:
        lossy = {"state": None, "compress": None, "master": "auto", "dtype": "float32"}
        lossy |= {"param_dtype": "float32", "activations": None}
        for name, exact in lossy.items():
            is_allowed = name.replace("_", "-") in limits.allowed
            assert is_allowed or getattr(one.config, name) == exact


@pytest.mark.long
def test_flags_that_are_given_stay(machine, asked):
    words = ("--mode", "stream", "--micro-batches", 2, "--state", "bf16")
    search, limits = asked("--machine", machine(), *words, batch_size=2)
    configs = [one.config for one in search.candidates(limits)]
    assert {(one.mode, one.state) for one in configs} == {("stream", "bf16")}
    assert {(one.micro_batches, one.order) for one in configs} == {
        (2, "auto"),
        (2, "layers"),
    }
    assert {one.policy for one in configs} == {"recompute", "keep", "offload", "plan"}


@pytest.mark.long
def test_a_search_within_other_limits_begins_anew(machine, asked):
    # Little memory lets fewer updates read ahead.
    words = ("--machine", machine(update=1e3), "--mode", "stream", "--store", "run")
    (used, limits), (fresh, _) = asked(*words), asked(*words)

    def step_s(search, num_bytes):
        return search._forecast({"memory": num_bytes})[-1].step_s

    assert step_s(used, 1 << 12) != step_s(used, limits.memory_bytes)
    assert step_s(used, limits.memory_bytes) == step_s(fresh, limits.memory_bytes)


@pytest.mark.long
def test_bits_are_lost_only_if_that_is_allowed(machine, asked):
    # Its drive is slow. For small leaves, int8 state with its pages of scales takes
    # more bytes than bf16.
    words = ("--machine", machine(), "--store", "kept", "--policy", "keep")
    words += ("--mode", "stream")
    search, limits = asked(*words)
    exact = search.fit(limits).best
    lossy = search.fit(dataclasses.replace(limits, allowed=frozenset(["state"]))).best
    assert exact.config.state is None
    assert lossy.config.state == "bf16"
    assert lossy.found.step_s < exact.found.step_s


@pytest.mark.long
def test_of_the_fastest_it_measures_programs(machine, asked):
    # By operations its one program takes minutes.
    search, limits = asked("--machine", machine(product=1e4), "--mode", "stream")
    planned, measured = (search.fit(limits, measures=way) for way in (False, True))
    assert measured.best.config in [
        one.config for one in (planned.best, *planned.others)
    ]
    assert measured.best.found.step_s < planned.best.found.step_s / 10


@pytest.mark.long
def test_where_nothing_fits_the_least_change_does(machine, asked):
    words = ("--machine", machine(), "--mode", "memory", "--memory", "1KiB")
    search, limits = asked(*words, batch_size=2)
    none = search.fit(limits)
    assert none.best is None
    assert [*none.changes] == ["--memory 1MiB"]  # half of the batch is not enough
    needed = limits.memory_bytes + round(none.nearest.excess(limits)["--memory"])
    for num_bytes in (needed, needed - 1):
        more = dataclasses.replace(limits, memory_bytes=num_bytes)
        assert (search.fit(more).best is not None) == (num_bytes == needed)


@pytest.mark.long
def test_where_drives_wear_out_it_says_what_helps(machine, asked):
    words = ("--machine", machine(drive=1e9, product=1e6), "--store", "kept")
    search, limits = asked(*words, "--policy", "keep", "--resident", "params")
    lives = [one.found.years for one in search.candidates(limits)]
    none = search.fit(dataclasses.replace(limits, years=max(lives) * 1.2))
    assert none.best is None
    assert none.changes["one more drive"].found.years > max(lives) * 1.4
    name = next(name for name in none.changes if name.startswith("--years"))
    assert max(lives) * 0.9 < float(name.split()[1]) <= max(lives)


@pytest.mark.long
def test_the_command_line_says_it(machine, text, tiny, tmp_path, capsys):
    line = ["plan", "--fit", "--data", text, "--batch-size", 1, "--seq-len", 8]
    line += ["--machine", machine(), "--store", tmp_path / "store"]

    def said(*words):
        assert main([str(word) for word in [*line, *words]]) == 0
        return capsys.readouterr().out

    with tiny():
        lines = said("--policy", "keep").split("\n")
        (command,) = [one for one in lines if one.startswith("python")]
        assert train_main([*shlex.split(command)[3:], "--dry-run"]) == 0
        (fastest,) = [one.split()[1] for one in lines if one.startswith("fastest")]
        assert f"{fastest} s a step" in capsys.readouterr().out
        words = ("--policy", "keep", "--resident", "params", "--memory", "1KiB")
        none = json.loads(said(*words, "--json"))
    assert not none["fits"]
    assert none["over"]["--memory"] == (none["nearest"]["memory_bytes"] - 1024)
    assert "--memory 1MiB" in none["changes"]
    assert not (tmp_path / "store").exists()


def test_what_has_no_answer_is_refused(machine, capsys):
    def refused(*words):
        assert main(["plan", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "--fit: expected --machine" in refused("--fit")
    assert "expected with --fit" in refused("--years", 2)
    words = ("--fit", "--machine", machine())
    assert "--years: expected a finite number above 0" in refused(*words, "--years", 0)
    assert "computes in the host's memory" in refused(*words, "--device-memory", "1GiB")
    assert "--reference" in refused(*words, "--reference", "split", "--store", "kept")
