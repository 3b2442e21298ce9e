"""The results of finetune_quality.py: their lines and tables.

Differences to dense are paired by seeds and files; their intervals of 95 % are by
bootstrap over both, since the examples of a file are not independent.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 4  # of a line of the results; another one is of other runs
LAYERS = 4
RATE = 5e-4
FEEDBACK = ",error_feedback=true"
STARTS = ("pretrained", "scratch")
RATIOS = (0.1, 0.02, 0.01)
MOST_RIGHT = 97.0  # percent; a task with more says nothing
LIMIT = 1.35  # points, the largest loss at 2 % in Smart-Infinity's table IV


@dataclass(frozen=True)
class Run:
    """One run of the table, and the key of its line.

    Attributes:
      task: of `finetune_tasks.TASKS`.
      variant: dense, or an argument of `--compress`.
      start: pretrained or scratch.
      model: of `MODELS`.
      factor: by which the usual learning rate is multiplied.
      seed: of a new head, or of all params, and of the batches.
      steps: its steps.
      layers: of the model; 4 have 3.7 M params.
    """

    task: str
    variant: str
    seed: int
    steps: int
    layers: int = LAYERS
    start: str = "pretrained"
    model: str = "gpt2"
    factor: float = 1.0


def read(path: Path, version: int = VERSION) -> list[dict[str, Any]]:
    """Returns the lines of a results file.

    Raises:
      SystemExit: a line is cut, or of another version of this script.
    """
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            raise SystemExit(
                f"{path}:{number}: expected a line of results, found one that is cut; "
                "delete it, and its run is done again"
            ) from None
        if not isinstance(line, dict) or line.get("version") != version:
            raise SystemExit(
                f"{path}:{number}: expected a line of version {version} of this "
                "script, found another; move the file away to begin a new one"
            )
        found.append(line)
    return found


# --- tables ------------------------------------------------------------------------

Counts = dict[int, dict[str, list[int]]]
"""Right and all examples by file, by seed."""


def difference(found: Counts, base: Counts) -> Counts:
    """Returns how many more are right, by the seeds and files that both have."""
    return {
        seed: {
            file: [right - base[seed][file][0], size]
            for file, (right, size) in found[seed].items()
        }
        for seed in found.keys() & base.keys()
    }


def together(tasks: Sequence[Counts]) -> Counts:
    """Returns the sums of several tasks, by the seeds that all have."""
    seeds = set.intersection(*(set(counts) for counts in tasks))
    files = {file for counts in tasks for own in counts.values() for file in own}
    return {
        seed: {
            file: [sum(pair) for pair in zip(*found, strict=True)]
            for file in files
            if (found := [c[seed][file] for c in tasks if file in c[seed]])
        }
        for seed in seeds
    }


def interval(counts: Counts, num_draws: int = 2000) -> tuple[float, float, float]:
    """Returns a mean in percent, and its 95 % interval.

    Args:
      counts: those of a variant, or a difference.
      num_draws: of the bootstrap over seeds and files.
    """
    seeds, files = sorted(counts), sorted(next(iter(counts.values())))
    right = np.array([[counts[s][f][0] for f in files] for s in seeds], float)
    sizes = np.array([counts[seeds[0]][f][1] for f in files], float)
    rng = np.random.default_rng(0)
    own, some = (  # how often each is drawn
        rng.multinomial(count, [1 / count] * count, num_draws) for count in right.shape
    )
    drawn = np.sum((own @ right) * some, axis=1) / (len(seeds) * (some @ sizes))
    mean = right.sum() / (len(seeds) * sizes.sum())
    low, high = np.percentile(drawn, [2.5, 97.5])
    return 100 * float(mean), 100 * float(low), 100 * float(high)


Setting = tuple[str, str, int, str, float, int]


def grouped(lines: Sequence[dict[str, Any]]) -> dict[Setting, dict[str, Counts]]:
    """Returns the counts of all variants by what else a run has."""
    found: dict[Setting, dict[str, Counts]] = {}
    for line in lines:
        if "run" not in line:
            continue
        run = Run(**line["run"])
        key = run.task, run.model, run.layers, run.start, run.factor, run.steps
        own = found.setdefault(key, {}).setdefault(run.variant, {})
        own[run.seed] = line["right"]
    return found


def shown(variant: str) -> str:
    """Returns a variant's name for people."""
    if variant == "dense":
        return variant
    ratio = float(variant.removeprefix("top_k:").removesuffix(FEEDBACK))
    without = "" if variant.endswith(FEEDBACK) else ", no feedback"
    return f"{100 * ratio:g} %{without}"


def say(arguments: argparse.Namespace) -> None:
    """Prints the tables."""
    lines = read(arguments.place / "results.jsonl")
    found = grouped(lines)
    say_tasks(found, {x["baselines"]: x["right"] for x in lines if "baselines" in x})
    say_variants(found)
    say_together(found)
    say_contrast(found)
    say_changes(found)
    say_best(found)
    sent = {line["bytes"]: line["sent"] for line in lines if "bytes" in line}
    for variant, count in sent.items():
        share = 100 * count / sent.get("dense", count)
        print(
            f"bytes of a step over the link, {shown(variant)}: {count} ({share:.2f} %)"
        )
    seconds = sum(line.get("seconds", 0) for line in lines)
    print(f"{sum('run' in line for line in lines)} runs, {seconds / 60:.0f} minutes")


def say_tasks(found: dict[Setting, dict[str, Counts]], baselines: Any) -> None:
    """Prints what a task must beat, and whether it does."""
    names = ("largest class", "linear", "from scratch", "pretrained")
    names += ("more than linear", "more than from scratch", "is kept")
    _row("task", *names)
    _row(*["---"] * (1 + len(names)))
    for key, own in found.items():
        task, start, factor = key[0], key[3], key[4]
        other = found.get((*key[:3], "scratch", *key[4:]), {}).get("dense")
        is_usual = (start, factor) == ("pretrained", 1) and "dense" in own
        if not is_usual or other is None or task not in baselines:
            continue
        dense = own["dense"]
        simple = [_each_seed(dense, baselines[task][name]) for name in names[:2]]
        each = [interval(counts) for counts in (*simple, other, dense)]
        gains = [interval(difference(dense, base)) for base in (simple[1], other)]
        is_kept = min(gain[1] for gain in gains) > 0 and each[-1][0] < MOST_RIGHT
        means = [f"{mean:.1f}" for mean, _, _ in each]
        cells = (*means, *map(_signed, gains), "yes" if is_kept else "no")
        _row(f"{task}, {key[1]}", *cells)
    print()


def _each_seed(like: Counts, right: dict[str, list[int]]) -> Counts:
    return dict.fromkeys(like, right)


def say_variants(found: dict[Setting, dict[str, Counts]]) -> None:
    """Prints what is right, and the differences to dense."""
    _row("task", "model of layers, start, rate, steps", "variant", "seeds", "right, %",
         "less dense")  # fmt: skip
    _row(*["---"] * 6)
    for (task, model, layers, start, factor, steps), own in found.items():
        setting = f"{model} of {layers}, {start}, {RATE * factor:.2g}, {steps}"
        for variant, counts in own.items():
            mean, low, high = interval(counts)
            cells = [f"{mean:.2f} [{low:.2f}, {high:.2f}]", ""]
            if variant != "dense" and own.get("dense", {}).keys() & counts.keys():
                less = interval(difference(counts, own["dense"]))
                cells[1] = f"{_signed(less)}, {verdict(*less[1:])}"
            _row(task, setting, shown(variant), str(len(counts)), *cells)
    print()


def say_together(found: dict[Setting, dict[str, Counts]]) -> None:
    """Prints the differences to dense of all tasks that have a variant."""
    less: dict[tuple[Any, ...], list[Counts]] = {}
    for key, own in found.items():
        for variant in own.keys() - {"dense"} if "dense" in own else ():
            points = difference(own[variant], own["dense"])
            less.setdefault((variant, *key[1:]), []).append(points)
    for (variant, model, layers, start, factor, steps), tasks in sorted(less.items()):
        if len(tasks) > 1 and (counts := together(tasks)):
            points = interval(counts)
            print(
                f"{len(tasks)} tasks, {model} of {layers}, {start}, "
                f"{RATE * factor:.2g}, {steps}, {shown(variant)}, {len(counts)} seeds: "
                f"less dense {_signed(points)}, {verdict(*points[1:])}"
            )
    print()


def say_contrast(found: dict[Setting, dict[str, Counts]]) -> None:
    """Prints how much less is lost from pretrained weights than from scratch.

    From scratch is at the usual rate, where the other rate was not run from there.
    """
    for key, own in found.items():
        usual = found.get((*key[:3], "scratch", 1.0, *key[5:]), {})
        other = found.get((*key[:3], "scratch", *key[4:]), usual)
        if key[3] != "pretrained" or not {"dense"} <= own.keys() & other.keys():
            continue
        for variant in sorted(own.keys() & other.keys() - {"dense"}):
            less, base = (
                difference(one[variant], one["dense"]) for one in (own, other)
            )
            if less.keys() & base.keys():
                points = _signed(interval(difference(less, base)))
                what = f"{key[0]}, {key[1]}, {RATE * key[4]:.2g}, {shown(variant)}"
                print(f"{what}: pretrained loses less by {points}")
    print()


def say_changes(found: dict[Setting, dict[str, Counts]]) -> None:
    """Prints what error feedback changes, and what another learning rate does."""
    for key, own in found.items():
        usual = found.get((*key[:4], 1.0, *key[5:]), {}) if key[4] != 1 else {}
        for variant, counts in own.items():
            compared = {"the usual rate": usual.get(variant, {})}
            if variant.endswith(FEEDBACK):
                compared["no feedback"] = own.get(variant.removesuffix(FEEDBACK), {})
            for name, base in compared.items():
                if counts.keys() & base.keys():
                    points = _signed(interval(difference(counts, base)))
                    what = f"{key[0]}, {key[1]}, {key[3]}, {RATE * key[4]:.2g}"
                    print(f"{what}, {shown(variant)} less {name}: {points}")
    print()


def say_best(found: dict[Setting, dict[str, Counts]]) -> None:
    """Prints each variant at its best learning rate, where there are several."""
    rates: dict[tuple[Any, ...], dict[str, dict[float, Counts]]] = {}
    for (task, model, layers, start, factor, steps), own in found.items():
        for variant, counts in own.items():
            setting = rates.setdefault((task, model, layers, start, steps), {})
            setting.setdefault(variant, {})[RATE * factor] = counts
    for (task, model, layers, start, steps), variants in rates.items():
        several = {v: by_rate for v, by_rate in variants.items() if len(by_rate) > 1}
        every = [counts for own in several.values() for counts in own.values()]
        seeds = set.intersection(*map(set, every)) if every else set()
        if not seeds or "dense" not in several:
            continue
        best: dict[str, tuple[float, Counts]] = {}
        for variant, by_rate in several.items():
            same = {
                rate: {seed: counts[seed] for seed in seeds}
                for rate, counts in by_rate.items()
            }
            best[variant] = max(same.items(), key=lambda one: interval(one[1])[0])
        for variant in sorted(best.keys() - {"dense"}):
            (rate, counts), (usual, base) = best[variant], best["dense"]
            less = _signed(interval(difference(counts, base)))
            print(
                f"{task}, {model} of {layers}, {start}, {steps}, at the best rates: "
                f"{shown(variant)} at {rate:.2g} less dense at {usual:.2g}: {less}"
            )
    print()


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def _signed(found: tuple[float, float, float]) -> str:
    mean, low, high = found
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def verdict(low: float, high: float) -> str:
    """Returns on which side of a loss of `LIMIT` points an interval is."""
    if low > -LIMIT:
        return f"loses less than {LIMIT}"
    return f"loses more than {LIMIT}" if high < -LIMIT else "undecided"
