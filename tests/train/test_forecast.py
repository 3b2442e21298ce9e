"""What a run will take: bytes are those of the run, times those of a model."""

import dataclasses
import io
import json
import re
from itertools import product

import numpy as np
import pytest
from families import family
from rich.console import Console

from jaxinf.cli import main
from jaxinf.plan import Rate, read_machine, write_machine
from jaxinf.train.progress import planning
from jaxinf.train.several import Failures


def of(value):
    return Rate(value, "this test", "measured")


@pytest.fixture
def machine(tmp_path):
    """A file: a CPU whose kernels and products take no time beside its one drive."""
    workstation = read_machine("workstation")
    drive = dataclasses.replace(workstation.drives[0], count=1, mixed=of(1e6))
    found = dataclasses.replace(
        workstation,
        num_cores=1,
        device=None,
        drives=(drive,),
        products={"float32": of(1e18)},
        updates={"adamw fp32": of(1e18), "adamw int8": of(1e18)},
        **dict.fromkeys(("launches", "calls", "moves")),
    )
    write_machine(tmp_path / "machine.json", found)
    return tmp_path / "machine.json"


@pytest.fixture
def planned(text, tiny, capsys):
    """Runs `jaxinf plan --json` for a tiny model; returns its document."""

    def call(*words):
        line = ["plan", "--data", text, "--batch-size", 2, "--seq-len", 8, "--json"]
        with tiny():
            assert main([str(word) for word in [*line, *words]]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_settings_of_a_file_count_and_flags_win(planned, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('state = "int8"\nmode = "memory"\n')
    expected = planned("--state", "int8")["sizes"]
    assert planned("--config", file, "--mode", "update")["sizes"] == expected
    file.write_text("states = 3\n")
    assert main(["plan", "--config", str(file)]) == 2
    assert "did you mean state" in capsys.readouterr().err


def test_what_does_not_fit_is_said_and_fails(planned, text, tiny, tmp_path, capsys):
    assert planned()["fits"]
    workstation = read_machine("workstation")
    device = dataclasses.replace(workstation.device, memory=of(2048))
    few = dataclasses.replace(workstation, device=device, memory=of(1 << 20))
    write_machine(tmp_path / "few.json", few)
    words = ["--data", text, "--batch-size", 2, "--seq-len", 8, "--state", "int8"]
    with tiny():
        line = ["plan", *words, "--machine", tmp_path / "few.json"]
        assert main([str(word) for word in line]) == 1
    out = capsys.readouterr().out
    assert re.search(r"does not fit: the device needs [\d.]+ KiB, has 2.00 KiB", out)
    assert re.search(r"does not fit: memory needs [\d.]+ MiB, has 1.00 MiB", out)
    assert re.search(r"(?m)^disk    needed [\d.]+ [KM]iB$", out)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_what_is_planned(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    with planning(console) as say:
        say("--store a\x1bb/[/x]")
    shown = console.file.getvalue()
    assert ("--store a\\x1bb/[/x]" in shown) == is_terminal
    assert is_terminal or not shown


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("--state", "int8"), ("--clip-norm", 0)])
def test_bytes_are_those_of_the_run(words, planned, run, tmp_path):
    sizes = planned(*words)["sizes"]
    store, logs = tmp_path / "store", tmp_path / "logs"
    assert run("--store", store, "--log-dir", logs, "--steps", 4, *words) == 0
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if "drive_read_bytes" in line][-1]
    assert last["drive_read_bytes"] == sizes["read_bytes"]
    assert last["drive_write_bytes"] == sizes["written_bytes"]


STEPS, KEPT = ["3"], ["checkpoint", "--checkpoint-every", 3, "--keep-last", 1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "commits"),
    family(
        [*product(("update", "stream"), (STEPS, KEPT))],
        short=[("update", KEPT), ("stream", STEPS)],
    ),
)
def test_state_that_stays_is_written_by_commits(mode, commits, planned, run, tmp_path):
    words = ["--mode", mode, "--state-tier", "host=1MiB", "--durability", *commits]
    if mode == "stream":
        words += ["--memory", "64MiB", "--resident", "params", "--clip-norm", 0]
    sizes = planned(*words)["sizes"]
    store, logs = tmp_path / "store", tmp_path / "logs"
    assert run("--store", store, "--log-dir", logs, "--steps", 9, *words) == 0
    lines = map(json.loads, (logs / "metrics.jsonl").read_text().splitlines())
    written = [line["drive_write_bytes"] for line in lines if "step_s" in line]
    found = sum(written[3:]) / len(written[3:])
    assert abs(found - sizes["written_bytes"]) < 1
    assert sizes["read_bytes"] == 0


def test_a_dry_run_says_the_same_and_writes_nothing(planned, run, machine, capsys):
    place = machine.parent
    words = ["--machine", machine, "--steps", 10]
    document = planned(*words)
    kept = {path: path.read_bytes() for path in place.iterdir()}
    options = ["--store", place / "store", "--log-dir", place / "logs", "--dry-run"]
    assert run(*options, *words) == 0
    out = capsys.readouterr().out
    assert f"{document['forecast']['step_s']:.3g} s a step" in out
    assert "nothing was trained or written" in out
    assert {path: path.read_bytes() for path in place.iterdir()} == kept


@pytest.mark.long
@pytest.mark.parametrize(
    ("field", "words", "num"),
    [
        ("launches", ["--mode", "memory"], 1),
        ("launches", ["--mode", "stream", "--memory", "64MiB"], 10),
        ("calls", ["--mode", "stream", "--memory", "64MiB"], 10),
        ("moves", [], 10),
        ("moves", ["--mode", "stream", "--memory", "64MiB"], 10),
    ],
)
def test_each_call_and_move_takes_its_time(planned, machine, field, words, num):
    before = planned("--machine", machine, *words)["forecast"]["step_s"]
    changed = dataclasses.replace(read_machine(machine), **{field: of(2)})
    write_machine(machine, changed)
    found = planned("--machine", machine, *words)["forecast"]["step_s"]
    assert found - before >= 0.99 * num * 0.5


def test_the_drive_alone_takes_its_bytes_over_its_rate(planned, machine):
    found = planned("--machine", machine)
    forecast, sizes = found["forecast"], found["sizes"]
    seconds = (sizes["read_bytes"] + sizes["written_bytes"]) / 1e6
    assert forecast["step_s"] == pytest.approx(seconds, rel=1e-3)
    assert forecast["bottleneck"] == "drives"
    assert found["changes"]["one more drive"] == pytest.approx(seconds / 2, rel=1e-3)
    assert found["changes"]["--state int8"] < seconds
    # 1,200 TB, at so many bytes a step.
    years = 1.2e15 / sizes["written_bytes"] * seconds / (365 * 86_400)
    assert forecast["years"] == pytest.approx(years, rel=1e-3)
    assert not forecast["guesses"]


@pytest.mark.parametrize("words", [[], ["--mode", "stream", "--memory", "64MiB"]])
def test_what_a_drive_has_in_a_cache_is_made_durable(planned, machine, words):
    # At a rate of its own: less than 1 is no error of units, only slow.
    before = planned("--machine", machine, *words)["forecast"]
    (drive,) = read_machine(machine).drives
    cached = dataclasses.replace(drive, flush=of(0.5))
    write_machine(machine, dataclasses.replace(read_machine(machine), drives=(cached,)))
    after = planned("--machine", machine, *words)["forecast"]
    seconds = after["sizes"]["written_bytes"] / 0.5
    commits = [found["phases"].get("commit", 0.0) for found in (before, after)]
    assert commits[1] - commits[0] == pytest.approx(seconds)
    assert after["step_s"] - before["step_s"] == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(("num_bytes", "is_said"), [(1 << 12, True), (1 << 30, False)])
def test_a_drive_measured_with_little_is_named(
    num_bytes, is_said, machine, text, tiny, capsys
):
    (drive,) = read_machine(machine).drives
    drive = dataclasses.replace(drive, file=of(num_bytes))
    write_machine(machine, dataclasses.replace(read_machine(machine), drives=(drive,)))
    with tiny():
        words = ["plan", "--data", text, "--batch-size", 2, "--seq-len", 8]
        assert main([str(word) for word in [*words, "--machine", machine]]) == 0
    advice = "drives were measured with 4.00 KiB, and may be slower for "
    assert (advice in capsys.readouterr().out) is is_said


def test_operations_count_where_products_are_slow(planned, machine):
    slow = dataclasses.replace(read_machine(machine), products={"float32": of(1e3)})
    write_machine(machine, slow)
    forecast = planned("--machine", machine, "--mode", "memory")["forecast"]
    assert forecast["bottleneck"] == "processor"
    assert forecast["step_s"] == pytest.approx(forecast["operations"] / 1e3, rel=1e-3)


def test_a_streamed_run_reads_its_params_twice(planned):
    words = ("--mode", "stream", "--memory", "64MiB")
    streamed, resident = planned(*words), planned(*words, "--resident", "params")
    num_bytes = 4 * streamed["sizes"]["num_params"]
    assert streamed["sizes"]["params_bytes"] >= 2 * num_bytes
    assert resident["sizes"]["params_bytes"] == 0
    assert streamed["sizes"]["memory_bytes"] == 64 << 20


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--memory", "64MiB"), marks=pytest.mark.long),
        ("--memory", "64MiB", "--clip-norm", 0, "--policy", "keep", "--measure"),
        pytest.param(
            ("--memory", "64MiB", "--resident", "params", "--micro-batches", 2),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--memory", "64MiB", "--policy", "offload", "--state", "bf16"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_bytes_of_a_streamed_step_are_those_of_the_run(
    words, planned, run, machine, tmp_path
):
    words = ("--mode", "stream", *words)
    sizes = planned(*words, "--machine", machine)["sizes"]
    store, logs = tmp_path / "store", tmp_path / "logs"
    words = [word for word in words if word != "--measure"]
    assert run("--store", store, "--log-dir", logs, "--steps", 4, *words) == 0
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if "step_s" in line][2]
    assert last["drive_read_bytes"] == sizes["read_bytes"]
    assert last["drive_write_bytes"] == sizes["written_bytes"]


@pytest.mark.long
def test_measured_programs_take_their_own_time(planned, machine):
    # By operations they take no time at all.
    words = ("--machine", machine, "--mode")
    for mode in (("memory",), ("update",), ("stream", "--memory", "64MiB")):
        counted, found = planned(*words, *mode), planned(*words, *mode, "--measure")
        assert counted["forecast"]["phases"].get("programs", 0) < 1e-6
        assert found["forecast"]["phases"]["programs"] > 1e-6


@pytest.mark.long
def test_the_process_counts_where_its_memory_is_known(planned, machine):
    assert planned("--machine", machine)["forecast"]["peak_bytes"] is None
    known = {mode: of(1e9) for mode in ("memory", "update", "stream")}
    write_machine(machine, dataclasses.replace(read_machine(machine), process=known))
    forecast = planned("--machine", machine, "--mode", "memory")["forecast"]
    assert 1e9 < forecast["peak_bytes"] < 1.1e9


@pytest.mark.long
def test_arrays_of_a_measured_program_count_once(planned, machine):
    known = {mode: of(1e9) for mode in ("memory", "update", "stream")}
    write_machine(machine, dataclasses.replace(read_machine(machine), process=known))
    for mode in ("memory", "update"):
        words = ("--machine", machine, "--mode", mode, "--batch-size", 1)
        counted, found = planned(*words), planned(*words, "--measure")
        peak_bytes = found["forecast"]["peak_bytes"]
        assert 1e9 < peak_bytes <= counted["forecast"]["peak_bytes"]


def test_without_a_machine_times_are_unknown(planned, run, tmp_path, capsys):
    assert set(planned()) == {"sizes", "fits"}
    assert run("--store", tmp_path / "store", "--dry-run") == 0
    assert "time    unknown: give --machine FILE" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


RATE = ("--learning-rate", 1e-3)  # which lion has no default for


def test_a_rate_in_place_of_another_is_a_guess(planned, machine):
    forecast = planned("--machine", machine, "--optimizer", "lion", *RATE)["forecast"]
    assert forecast["guesses"] == ["updates['adamw fp32'] for lion fp32"]
    forecast = planned("--machine", "smartssd-server")["forecast"]
    assert "products['float16'] for float32" in forecast["guesses"]


def test_what_cannot_be_planned_is_refused(run, machine, tmp_path, capsys):
    words = ("--store", tmp_path / "store", "--dry-run", "--machine")
    assert run(*words, tmp_path / "none.json") == 2
    assert "expected a file that 'jaxinf doctor --machine" in capsys.readouterr().err
    lacking = dataclasses.replace(read_machine(machine), products={})
    write_machine(machine, lacking)
    assert run(*words, machine) == 2
    assert "expected a rate for float32" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


@pytest.mark.long
def test_a_change_that_does_not_fit_is_no_advice(planned, machine):
    words = ("--machine", machine, "--mode", "stream", "--memory")
    assert "--resident params" in planned(*words, "64MiB")["changes"]
    changes = planned(*words, "340KiB")["changes"]
    assert "--resident params" not in changes
    assert "one more drive" in changes


# --- several processes


@pytest.mark.parametrize("layout", [(), ("--fsdp",)])
def test_processes_divide_the_bytes_of_one(planned, layout):
    alone = planned()["sizes"]
    (one,) = planned("--processes", 1, *layout)["hosts"]
    assert one["read_bytes"] == [alone["read_bytes"]]
    assert one["written_bytes"] == [alone["written_bytes"]]
    found = planned("--processes", 2, *layout)
    for name in ("read_bytes", "written_bytes"):
        parts = [host[name][0] for host in found["hosts"]]
        assert min(parts) / sum(parts) > 0.4
        if not layout:  # shards of small leaves are files without a page's rest
            assert sum(parts) == alone[name]
    links, num_bytes = found["links"], 4 * alone["num_params"]
    assert links["summed_bytes"] + links["parts_bytes"] == 2 * num_bytes
    assert links["sent_bytes"] == (links["summed_bytes"] + links["parts_bytes"] // 2)
    assert bool(links["parts_bytes"]) == bool(layout)


def test_links_and_round_trips_take_their_time(planned, machine):
    several = ("--machine", machine, "--processes", 2)
    with_links = dataclasses.replace(
        read_machine(machine), network=of(1e4), round_trips=of(2.0)
    )
    write_machine(machine, with_links)
    found = planned(*several, "--failures", 3.0, "--restart", 7)
    assert found["link_s"] == found["links"]["sent_bytes"] / 1e4
    assert found["commit_s"] == pytest.approx(1.0)
    forecast = found["forecast"]
    state = max(h["read_bytes"][0] + h["written_bytes"][0] for h in found["hosts"])
    assert forecast["step_s"] == pytest.approx(state / 1e6 + found["link_s"], rel=0.2)
    lost = found["failures"]
    assert lost["lost_steps"] == pytest.approx(0.5 + 1 / forecast["step_s"])
    assert lost["per_day"] == pytest.approx(2 * 3 / 365.25)


def test_what_is_lost_is_that_of_a_run_that_fails_anywhere():
    step_s, commit_s, every, restart_s = 2.0, 3.0, 4, 11.0
    found = Failures.of(
        50.0,
        8,
        step_s=step_s,
        commit_s=commit_s,
        steps_per_commit=every,
        restart_s=restart_s,
    )
    at_s = np.linspace(1e4, 2e4, 100_003)
    durable = (at_s - commit_s) // (every * step_s) * every * step_s
    assert found.lost_steps == pytest.approx((at_s - durable).mean() / step_s, rel=1e-3)
    assert found.lost_s == pytest.approx(found.lost_steps * step_s + restart_s)
    mean_s = (
        365.25 * 86_400 / 400
    )  # from one failure to the next, without what it takes
    assert found.share == pytest.approx(found.lost_s / (mean_s + found.lost_s))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--processes", 0), "--processes: expected at least 1"),
        (("--processes", 3), "expected a multiple of the 3 processes, got 2"),
        (("--processes", 2, "--fit"), "not supported yet with --processes"),
        (("--processes", 2, "--mode", "memory"), "expected --mode update"),
        (("--failures", 1), "--failures: expected with --processes"),
        (("--processes", 2, "--failures", 1), "--failures: expected with --machine"),
        (("--processes", 2, "--machine", "workstation"), "expected a rate"),
    ],
)
def test_processes_that_cannot_be_planned(words, said, text, tiny, capsys):
    line = ["plan", "--data", text, "--batch-size", 2, "--seq-len", 8, *words]
    with tiny():
        assert main([str(word) for word in line]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(("mixed", "every"), [(1e9, 0), (1e12, 2)])
def test_updates_on_the_device_need_fast_drives(planned, tmp_path, mixed, every):
    workstation = read_machine("workstation")
    drive = dataclasses.replace(workstation.drives[0], count=2, mixed=of(mixed))
    device = dataclasses.replace(
        workstation.device, to_device=of(40e9), to_host=of(40e9)
    )
    found = dataclasses.replace(
        workstation,
        num_cores=1,
        drives=(drive,),
        device=device,
        copy=of(50e9),
        updates={"adamw fp32": of(1e9)},
    )
    file = tmp_path / "machine.json"
    write_machine(file, found)
    words = ("--machine", file, "--mode", "stream", "--memory", "64MiB")
    helps = planned(*words)["forecast"]["device_updates"]
    assert helps["every"] == every
    assert helps["drives"] == 2 * mixed
    assert (helps["drives"] > helps["least_drives"]) == bool(every)
    assert helps["least_drives"] > 24e9  # 24 bytes a param, in whole pages
    assert planned(*words[:2])["forecast"]["device_updates"] is None
