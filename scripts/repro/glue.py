"""Fine-tunes the weights of a folder on GLUE, dense and with compressed gradients.

    python scripts/repro/glue.py GLUE --from bert-large-uncased --results FILE
    python scripts/repro/glue.py GLUE --from gpt2-large --results FILE --task SST-2

GLUE is a folder with a folder for each task: TSV as distributed (SST-2/train.tsv), or
as `save_to_disk` of `datasets` writes it (sst2). Tasks, ratios, no error feedback, and
the metric, accuracy on the validation part, are those of Smart-Infinity's table IV. The
paper does not state epochs, batches, learning rate or seeds. Here they are 3 epochs, 32
examples, 2e-5 falling linearly to 0, and seed 0, within what BERT's paper names. A run
whose line is in the results is not repeated. All state is in memory.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune_quality import Task
from finetune_results import read

from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig

VERSION = 1
VARIANTS = ("dense", "top_k:0.1", "top_k:0.02", "top_k:0.01")
_MOST_BROKEN = 0.01  # of the rows; some distributed files have a few


@dataclass(frozen=True)
class Spec:
    """The columns of a task.

    Attributes:
      saved: the name of its folder and config in `datasets`.
      texts: columns of the distributed file, then of a saved one.
      label: column of the distributed file; of a saved one it is `label`.
      labels: the classes in the order of their numbers.
      held: distributed files of the validation part, and saved splits.
    """

    saved: str
    texts: tuple[tuple[str, ...], tuple[str, ...]]
    label: str = "label"
    labels: tuple[str, ...] = ("0", "1")
    held: tuple[tuple[str, str], ...] = (("dev.tsv", "validation"),)


TASKS: Mapping[str, Spec] = {
    "MNLI": Spec(
        "mnli",
        (("sentence1", "sentence2"), ("premise", "hypothesis")),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        (
            ("dev_matched.tsv", "validation_matched"),
            ("dev_mismatched.tsv", "validation_mismatched"),
        ),
    ),
    "QQP": Spec(
        *("qqp", (("question1", "question2"), ("question1", "question2"))),
        label="is_duplicate",
    ),
    "SST-2": Spec("sst2", (("sentence",), ("sentence",))),
    "QNLI": Spec(
        *("qnli", (("question", "sentence"), ("question", "sentence"))),
        labels=("entailment", "not_entailment"),
    ),
}


def records(root: Path, task: str, part: int | None) -> Iterator[dict[str, Any]]:
    """Yields the examples of a part as records of the trainer.

    Args:
      root: the folder of all tasks.
      task: of `TASKS`.
      part: None for training, else the number of a validation part.

    Raises:
      UsageError: a split or a column is missing, or a label is none of the task's.
    """
    spec = TASKS[task]
    file, split = ("train.tsv", "train") if part is None else spec.held[part]
    distributed, saved = root / task / file, root / spec.saved
    folders = saved.iterdir() if saved.is_dir() else ()
    splits = {folder.name: folder for folder in folders if [*folder.glob("*.arrow")]}
    if distributed.is_file():
        rows, texts, label = _tsv(distributed), spec.texts[0], spec.label
    elif split in splits:
        rows = _saved(splits[split])
        texts, label = spec.texts[1], "label"
    else:
        raise UsageError(
            f"{root}: expected {task}/{file}, or split {split} of {spec.saved} as "
            f"save_to_disk writes it, found {', '.join(sorted(splits)) or 'neither'}"
        )
    for where, row in rows:
        lacking = [name for name in (*texts, label) if name not in row]
        if lacking:
            raise UsageError(
                f"{where}: expected the columns {', '.join((*texts, label))} of "
                f"{task}, found no {', '.join(lacking)}"
            )
        names = ("text", "text_pair")[: len(texts)]
        record = dict(zip(names, (row[name] for name in texts), strict=True))
        yield record | {"label": _label(where, spec, row[label])}


def _label(where: str, spec: Spec, found: Any) -> int:
    if isinstance(found, str) and found in spec.labels:
        return spec.labels.index(found)
    if isinstance(found, int) and 0 <= found < len(spec.labels):
        return found
    hidden = "; test splits have no labels" if found in (-1, "-1") else ""
    raise UsageError(
        f"{where}: expected a label of {', '.join(spec.labels)}, found "
        f"{found!r}{hidden}; if it is of another column, the line is shifted"
    )


def _saved(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields rows with their place."""
    import pyarrow as pa

    for path in sorted(folder.glob("*.arrow")):
        with pa.memory_map(str(path)) as file:
            rows = pa.ipc.open_stream(file).read_all().to_pylist()
        yield from (
            (f"{path}: row {number}", row) for number, row in enumerate(rows, 1)
        )


def _tsv(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yields rows with their place; quotes mean nothing in GLUE's files."""
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    names = lines[0].rstrip("\r").split("\t")
    rows = [line.rstrip("\r").split("\t") for line in lines[1:]]
    broken = [number for number, row in enumerate(rows, 2) if len(row) != len(names)]
    if len(broken) > _MOST_BROKEN * len(rows):
        raise UsageError(
            f"{path}:{broken[0]}: expected {len(names)} columns as in the first line, "
            f"found {len(rows[broken[0] - 2])}, and so in {len(broken)} of {len(rows)}"
        )
    if broken:
        print(f"{path}: {len(broken)} rows with missing columns are left out")
    for number, row in enumerate(rows, 2):
        if len(row) == len(names):
            yield f"{path}:{number}", dict(zip(names, row, strict=True))


def write(root: Path, task: str, place: Path) -> tuple[Path, list[Path]]:
    """Writes the parts of a task for the trainer, unless they are there."""
    place.mkdir(parents=True, exist_ok=True)
    parts = (None, *range(len(TASKS[task].held)))
    files = [place / f"{task}-{'train' if n is None else n}.jsonl" for n in parts]
    for part, file in zip(parts, files, strict=True):
        if not file.exists():
            lines = [json.dumps(one) + "\n" for one in records(root, task, part)]
            file.write_text("".join(lines))
    return files[0], files[1:]


def measure(arguments: argparse.Namespace) -> None:
    """Does the runs that the results lack, and prints each."""
    results: Path = arguments.results
    done = [line["run"] for line in read(results, VERSION)]
    place = results.with_suffix(".data")
    for name in arguments.task or TASKS:
        train, held = write(arguments.glue, name, place)
        num_examples = len(train.read_text().splitlines())
        usual = TrainConfig(
            mode="memory",
            task="classification",
            source=arguments.source,
            data=(str(train),),
            num_labels=len(TASKS[name].labels),
            seq_len=arguments.seq_len,
            batch_size=arguments.batch_size,
            steps=arguments.steps or 3 * num_examples // arguments.batch_size,
            learning_rate=2e-5,
            optimizer_args=("weight_decay=0",),
            schedule="linear",
            seed=arguments.seed,
        )
        parts: list[Task] = []
        for variant in arguments.variant or VARIANTS:
            run = {"task": name, "variant": variant, "seed": arguments.seed}
            run |= {"from": str(arguments.source), "steps": usual.steps}
            if run in done:
                continue
            parts = parts or [Task(replace(usual, validation=(str(f),))) for f in held]
            compress = None if variant == "dense" else variant
            own = replace(usual, validation=(str(held[0]),), compress=compress)
            params = parts[0].train(own)
            accuracy = [100 * float(part.right(params).mean()) for part in parts]
            line = {"version": VERSION, "run": run, "accuracy": accuracy}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name} {variant}: {accuracy} % right", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("glue", type=Path)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines")
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--variant", action="append", help="dense, or of --compress")
    parser.add_argument("--steps", type=int, help="by default 3 epochs")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    try:
        measure(parser.parse_args(words))
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
