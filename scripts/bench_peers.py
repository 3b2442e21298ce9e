"""jaxinf beside DeepSpeed and plain optax, each in a process of its own.

All train a GPT-2 by AdamW in float32 on the processor, in turns: `--what update` is the
update alone, `step` a whole step. In a turn each runs a step that does not count and
then --steps that do. Without an environment for DeepSpeed it is left out.

    python scripts/bench_peers.py --store DIR --deepspeed-python DS/bin/python \\
        --what step --preset small

    step            seconds, the median of the turns, and the fastest and the slowest
    flush           seconds that a flush of the drive takes after a turn: a commit of
                    jaxinf has had its own, others leave it
    read, written   bytes of drives a param and step, as the kernel counts them
    peak            the most memory of the process, from its beginning
    time, bytes,    a contender's over those of the first, the median of the turns' own
    memory          ratios; then an interval that has the median with 95 % confidence

DeepSpeed compiles its C++ when it first runs, which takes minutes (TORCH_EXTENSIONS_DIR
says where it is kept); it needs the headers of libaio.
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bench
from jaxinf_models import PRESETS, num_params

HERE = Path(__file__).resolve().parent
RATIOS = {"step_s": "time", "moved_bytes": "bytes", "peak_bytes": "memory"}


@contextmanager
def running(
    python: str, script: str, given: Mapping[str, Any], place: Path
) -> Iterator[subprocess.Popen[str]]:
    """A contender's process, whose files are in `place`; it is ended after the body."""
    place.mkdir(parents=True)
    words = json.dumps({**given, "place": str(place)})
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            [python, str(HERE / script), words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def answer(process: subprocess.Popen[str], place: Path) -> dict[str, Any]:
    """Returns what a contender says next."""
    assert process.stdout is not None
    if line := process.stdout.readline():
        return json.loads(line)
    tail = "\n".join((place / "log").read_text().splitlines()[-20:])
    code = process.wait()
    raise SystemExit(f"bench_peers: {process.args} ended with {code}:\n{tail}")


def contenders(arguments: argparse.Namespace) -> dict[str, tuple[str, str, Any]]:
    """Returns Python, script and words by name; others are compared with the first."""
    config = PRESETS[arguments.preset]
    given = {
        "params": num_params(config),
        "preset": arguments.preset,
        "shape": {
            k: v for k, v in dataclasses.asdict(config).items() if type(v) is int
        },
        "state": "fp32",
        "durability": "step",
    }
    for name in ("micro_batches", "batch_size", "seq_len", "memory"):
        given[name] = getattr(arguments, name)

    def ours(contender: str, **own: Any) -> tuple[str, str, Any]:
        own = {**given, **own, "contender": contender}
        return sys.executable, "peers_jax.py", own

    found = {}
    if arguments.what == "step":
        found["jaxinf"] = ours("step")
    else:
        for state, name in (("fp32", "jaxinf"), ("int8", "jaxinf, int8")):
            found[name] = ours("update", state=state)
            own = {"state": state, "durability": "checkpoint"}
            found[f"{name}, not flushed"] = ours("update", **own)
    if arguments.deepspeed_python:
        own = given | {"contender": f"deepspeed {arguments.what}"}
        found["DeepSpeed"] = arguments.deepspeed_python, "peers_torch.py", own
    found["optax in memory"] = ours(f"{arguments.what} in memory")
    return found


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Runs all contenders in turns."""
    programs = contenders(arguments)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    about: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        processes = {}
        for number, (name, program) in enumerate(programs.items()):
            where = place / f"{number}"
            processes[name] = stack.enter_context(running(*program, where)), where
            about[name] = answer(*processes[name])
        for turn in range(arguments.turns):
            for name, (process, where) in processes.items():
                assert process.stdin is not None
                process.stdin.write(f"{arguments.steps}\n")
                process.stdin.flush()
                turns[name].append(answer(process, where))
            shown = (f"{name} {own[-1]['step_s']:.2f} s" for name, own in turns.items())
            print(f"turn {turn + 1}: {', '.join(shown)}", file=sys.stderr)
    first = by_figure(next(iter(turns.values())))
    found: dict[str, Any] = {}
    for name, own in turns.items():
        columns, params = by_figure(own), about[name]["params"]
        found[name] = {
            **about[name],
            **{key: statistics.median(values) for key, values in columns.items()},
            "step_s_spread": [min(columns["step_s"]), max(columns["step_s"])],
            "turns": len(own),
        }
        for key in ("read_bytes", "written_bytes", "moved_bytes"):
            found[name][key] /= params
        for key in RATIOS:
            if all(first[key]):
                found[name] |= bench.ratios(f"{key}_ratio", columns[key], first[key])
    size = f"{arguments.micro_batches} x {arguments.batch_size} x {arguments.seq_len}"
    title = f"{arguments.what}, GPT-2 {arguments.preset}"
    title += f", {size}" if arguments.what == "step" else ""
    return {"case": title, "load_average": bench.load_average(), **found}


def by_figure(turns: list[dict[str, float]]) -> dict[str, list[float]]:
    """Returns the figures of all turns by name."""
    for one in turns:
        one["moved_bytes"] = one["read_bytes"] + one["written_bytes"]
    return {key: [one[key] for one in turns] for key in turns[0]}


def show(found: dict[str, Any]) -> None:
    """Prints a table, and ratios with their intervals."""
    title, _, *names = found
    rows = []
    for name in names:
        one = found[name]
        row = {found[title]: name, "step, s": one["step_s"], "flush, s": one["flush_s"]}
        row |= {"read": one["read_bytes"], "written": one["written_bytes"]}
        row["peak, GB"] = one["peak_bytes"] / 1e9
        for key, word in RATIOS.items():
            low, high = one.get(f"{key}_ratio_interval", (math.nan, math.nan))
            middle = one.get(f"{key}_ratio", math.nan)
            row[word] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append(row)
    bench.print_table(rows, 22)


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        show,
        deepspeed_python={"metavar": "PYTHON", "help": "has deepspeed"},
        what={"choices": ("update", "step"), "default": "update"},
        preset={"choices": [*PRESETS], "default": "small"},
        micro_batches=1,
        batch_size={"type": int, "default": 4, "help": "of a part"},
        seq_len=256,
        memory=bench.SIZE | {"default": 4 << 30, "help": "of jaxinf's step"},
        turns=8,
        steps={"type": int, "default": 1, "help": "counted in a turn"},
    )
