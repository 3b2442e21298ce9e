"""jaxinf beside DeepSpeed and plain optax, each in a process of its own.

All train a GPT-2 by AdamW in float32 on the processor, in turns: `update` is the update
alone, `step` a whole step. In a turn each runs a step that does not count and then
--steps that do. Without an environment for DeepSpeed it is left out.

    python scripts/bench_peers.py --store DIR --deepspeed-python DS/bin/python \\
        --what update step --preset small

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
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinf_models import PRESETS, num_params
from ratios import interval, pairwise

from jaxinf.terminal import parse_bytes

HERE = Path(__file__).resolve().parent
FIGURES = ("step_s", "flush_s", "read_bytes", "written_bytes", "peak_bytes")


@dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
      what: ``"update"`` or ``"step"``.
      preset: the model's.
      micro_batches: parts of a batch.
    """

    what: str
    preset: str
    micro_batches: int

    def title(self, arguments: argparse.Namespace) -> str:
        """Names it for people."""
        batch = ""
        if self.what == "step":
            size = f"{arguments.batch_size} x {arguments.seq_len}"
            batch = f", {self.micro_batches} parts of {size}"
        return f"{self.what}, GPT-2 {self.preset}{batch}"


@dataclass(frozen=True)
class Program:
    """A contender: its Python and script, and what it is given."""

    python: str
    script: str
    given: Mapping[str, Any]


class Running:
    """A contender's process, at rest until it is asked for steps.

    Args:
      program: what it runs.
      place: an empty directory on the drive, for its files.
    """

    def __init__(self, program: Program, place: Path) -> None:
        place.mkdir(exist_ok=True)
        given = json.dumps({**program.given, "place": str(place)})
        command = [program.python, str(HERE / program.script), given]
        self._log = place / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def turn(self, num_steps: int) -> dict[str, float]:
        """Runs steps; returns their figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = "\n".join(self._log.read_text().splitlines()[-20:])
            raise SystemExit(
                f"bench_peers: {self._process.args} ended with {code}:\n{tail}"
            )
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def programs(case: Case, arguments: argparse.Namespace) -> dict[str, Program]:
    """Returns the contenders by name; the others are compared with the first."""
    config = PRESETS[case.preset]
    given = {
        "params": num_params(config),
        "preset": case.preset,
        "shape": dataclasses.asdict(config, dict_factory=whole_numbers),
        "micro_batches": case.micro_batches,
        "policy": "keep",
        "state": "fp32",
        "durability": "step",
        "memory": arguments.memory,
        **{name: getattr(arguments, name) for name in ("batch_size", "seq_len")},
    }

    def jax(contender: str, **own: Any) -> Program:
        own = {**given, **own, "contender": contender}
        return Program(sys.executable, "peers_jax.py", own)

    def deepspeed(**own: Any) -> Program:
        own = {**given, **own, "contender": f"deepspeed {case.what}"}
        return Program(arguments.deepspeed_python, "peers_torch.py", own)

    found: dict[str, Program] = {}
    if case.what == "update":
        found["jaxinf"] = jax("update")
        found["jaxinf, not flushed"] = jax("update", durability="checkpoint")
        found["jaxinf, int8"] = jax("update", state="int8")
        found["jaxinf, int8, not flushed"] = jax(
            "update", state="int8", durability="checkpoint"
        )
        if arguments.deepspeed_python:
            found["DeepSpeed"] = deepspeed()
    for policy in arguments.policy if case.what == "step" else ():
        found[f"jaxinf, {policy}"] = jax("step", policy=policy)
        if arguments.deepspeed_python:
            found[f"DeepSpeed, {policy}"] = deepspeed(policy=policy)
    found["optax in memory"] = jax(f"{case.what} in memory")
    return found


def whole_numbers(fields: list[tuple[str, Any]]) -> dict[str, int]:
    """Returns the fields that are whole numbers: the model's shape."""
    return {name: value for name, value in fields if type(value) is int}


def measure(
    case: Case, arguments: argparse.Namespace, place: Path
) -> dict[str, dict[str, Any]]:
    """Runs all contenders in turns; returns each one's turns, and what it says."""
    found = programs(case, arguments)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    about: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        for turn in range(arguments.turns):
            for number, (name, program) in enumerate(found.items()):
                if name not in running:
                    folder = place / f"{number}-{turn}"
                    running[name] = Running(program, folder)
                    stack.callback(running[name].close)
                    about[name] = running[name].about
                turns[name].append(running[name].turn(arguments.steps))
                if arguments.anew:
                    running.pop(name).close()
            shown = (f"{name} {own[-1]['step_s']:.2f} s" for name, own in turns.items())
            print(f"turn {turn + 1}: {', '.join(shown)}", file=sys.stderr)
    return {name: {**about[name], "turns": own} for name, own in turns.items()}


def figures(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns medians of each contender, and its ratios to the first."""
    first = by_figure(next(iter(found.values())))
    result = {}
    for name, one in found.items():
        own = by_figure(one)
        result[name] = {
            **{key: value for key, value in one.items() if key != "turns"},
            **{key: statistics.median(values) for key, values in own.items()},
            "step_s_spread": [min(own["step_s"]), max(own["step_s"])],
            "turns": len(own["step_s"]),
        }
        for ratio in ("step_s", "moved", "peak_bytes"):
            ratios = pairwise(own[ratio], first[ratio]) if all(first[ratio]) else []
            if ratios:
                middle = statistics.median(ratios)
                result[name][f"{ratio}_ratio"] = [middle, *interval(ratios)]
    return result


def by_figure(one: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns a contender's figures of all turns; bytes of drives are a param's."""
    own = {key: [float(turn[key]) for turn in one["turns"]] for key in FIGURES}
    for key in ("read_bytes", "written_bytes"):
        own[key] = [value / one["params"] for value in own[key]]
    moved = zip(own["read_bytes"], own["written_bytes"], strict=True)
    return {**own, "moved": [read + written for read, written in moved]}


def table(title: str, found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    columns = "step, s | flush, s | read, written | peak, GB | time | bytes | memory"
    yield f"| {title} | {columns} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, one in found.items():
        low, high = one["step_s_spread"]
        cells = [
            name,
            f"{one['step_s']:.3g} ({low:.3g} to {high:.3g})",
            f"{one['flush_s']:.2g}",
            f"{one['read_bytes']:.1f}, {one['written_bytes']:.1f}",
            f"{one['peak_bytes'] / 1e9:.2f}",
        ]
        for ratio in ("step_s", "moved", "peak_bytes"):
            middle, low, high = one.get(f"{ratio}_ratio", (None,) * 3)
            text = (
                f"{middle:.2f} ({low:.2f} to {high:.2f})" if middle is not None else ""
            )
            cells.append(text)
        yield f"| {' | '.join(cells)} |"


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Returns all that is to be compared; an update has no parts of a batch."""
    axes = (arguments.what, arguments.preset, arguments.micro_batches)
    found = itertools.starmap(Case, itertools.product(*axes))
    whole = (
        dataclasses.replace(c, micro_batches=1) if c.what == "update" else c
        for c in found
    )
    return list(dict.fromkeys(whole))


def main() -> None:
    """Prints a table of each case, or with --json a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--deepspeed-python", metavar="PYTHON", help="has deepspeed")
    parser.add_argument(
        "--what", nargs="+", choices=("update", "step"), default=["update", "step"]
    )
    parser.add_argument("--preset", nargs="+", choices=[*PRESETS], default=["small"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1])
    parser.add_argument("--batch-size", type=int, default=4, help="of a part")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument(
        "--policy", nargs="+", choices=("keep", "recompute"), default=["keep"],
        help="of activations, for jaxinf's step and DeepSpeed's",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=parse_bytes, default=4 << 30, help="of jaxinf's step"
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="counted in a turn")
    parser.add_argument(
        "--anew", action="store_true",
        help="start each in each turn, if they do not fit into memory together",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="a line of each case")
    arguments = parser.parse_args()
    arguments.store.mkdir(parents=True, exist_ok=True)
    for case in cases(arguments):
        with tempfile.TemporaryDirectory(
            dir=arguments.store, prefix="bench-peers-"
        ) as place:
            found = figures(measure(case, arguments, Path(place)))
        title = case.title(arguments)
        if arguments.json:
            load = round(os.getloadavg()[0], 2)
            print(json.dumps({"case": title, "load_average": load, **found}))
        else:
            print(*table(title, found), sep="\n", end="\n\n", flush=True)


if __name__ == "__main__":
    main()
