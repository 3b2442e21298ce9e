"""Readers of data and weights, given files that are damaged or that lie.

`Readers` runs numbered cases in a child that is bounded in memory and time, and starts
another when it dies. `python -m reader_fuzzing READER NUMBER` repeats one case and
shows what happened; a reader and a number are the whole seed.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

import fuzzed_files
import numpy as np
from jaxinf_models import ModelFiles, abstract_params, deferred_params

from jaxinf.errors import JaxinfError
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.images import load_images
from jaxinf.train.data.texts import load_texts
from jaxinf.train.data.tokenizer import open_tokenizer
from jaxinf.train.options import DataOptions

MEMORY_BYTES = 1 << 30
"""Limit of the address space that a case may take beside the child's own."""

CPU_SECONDS, SECONDS = 20, 200
_MOST_MESSAGE_CHARS = 20_000
_ODD = set(map(chr, (*range(10), *range(11, 32), 127, 0x9B, 0x202E, 0xD800)))


def _texts(place):
    """Reads records or plain text as a run does."""
    found = sorted(p for p in place.iterdir() if p.suffix or p.is_dir())
    found = [p for p in found if p.name != "tokenizer.json"]
    options = DataOptions(
        data=tuple(map(str, found)),
        tokenizer=place if (place / "tokenizer.json").is_file() else None,
        validation=("0.25",),
    )
    kept = place / "task"
    task = kept.read_text() if kept.is_file() else "causal-lm"
    return _use(load_texts(options, task=task, seq_len=20))


def _images(place):
    options = DataOptions(data=(str(next(place.iterdir())),), validation=("0.5",))
    return _use(load_images(options, (4, 4, 3)))


def _use(data):
    for rows in (data.train, data.validation):
        for number in range(min(len(rows), 20)):
            for values in rows[number].values():
                assert np.isfinite(values).all()
    return " ".join((data.description, data.example, *data.notes))


def _tokenizer(place):
    tokenizer = open_tokenizer(place)
    texts = ["one two", "", "Ünïcödé 🙂\n\0 <mask> [UNK]", "</s>" * 9, b"one " * 500]
    for ids in tokenizer.encode([("text", text) for text in texts], is_whole=True):
        assert not ids.size or ids.max() < tokenizer.vocab_size
        tokenizer.decode(ids)
    tokenizer.classified("pair", texts[:2], most=9, has_types=True)
    tokenizer.decode(np.arange(300))
    return tokenizer.name


def _weights(place):
    import jax

    files = ModelFiles.of_folder(place)
    params = deferred_params(files, files.config, 0)
    assert {leaf.shape for leaf in jax.tree.leaves(params)} == {
        leaf.shape for leaf in jax.tree.leaves(abstract_params(files.config)[1])
    }
    for leaf in jax.tree.leaves(params):
        np.asarray(leaf)
    return ""


READERS = {
    "text": _texts,
    "jsonl": _texts,
    "json": _texts,
    "parquet": _texts,
    "packed": _texts,
    "images": _images,
    "tokenizer": _tokenizer,
    "config": _weights,
    "safetensors": _weights,
    "index": _weights,
}


def outcome_of(reader, number, place):
    """Runs one case below `place`; returns how it ended, and why."""
    rng = random.Random(f"{reader} {number}")
    case = place / f"{reader}-{number}"
    try:
        fuzzed_files.write(reader, number, rng, case)
        said = READERS[reader](case)
        outcome = "ok"
    except (DataError, JaxinfError) as error:
        outcome, said = "refused", str(error)
    except BaseException as error:
        frames = traceback.format_exception(error)
        return "raw", "".join(frames[-6:])
    finally:
        shutil.rmtree(case, ignore_errors=True)
    if set(said) & _ODD or len(said) > _MOST_MESSAGE_CHARS:
        return "raw", f"{len(said)} characters: {said[:400]!a}"
    return outcome, said


class Readers:
    """Runs cases in a child; a context manager, at whose end the child ends."""

    def __init__(self):
        self._child = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._child is not None:
            self._child.stdin.close()
            self._child.wait()
            self._child.stdout.close()
        self._child = None

    def run(self, reader, numbers):
        """Returns the number of cases by outcome, and what is wrong with which."""
        counts, wrong = Counter(), []
        for number in numbers:
            outcome, why = self._outcome(reader, number)
            counts[outcome] += 1
            if outcome not in ("ok", "refused"):
                wrong.append(f"{reader} {number}: {outcome}: {why}")
        return counts, wrong

    def _outcome(self, reader, number):
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "reader_fuzzing"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **_FEW_RESERVES},
            )
        self._child.stdin.write(f"{reader} {number}\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if answer:
            return json.loads(answer)
        status = self._child.wait()
        self.__exit__()
        return "died", f"exit status {status}"


# Arrow's other pools reserve a whole GiB each, and malloc 64 MiB for each thread.
_FEW_RESERVES = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}


def _limit_memory():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmSize"))
    most = 1024 * int(line.split()[1]) + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _serve(place):
    """Answers each case on standard output, where no library may write."""
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    for line in sys.stdin:
        reader, number = line.split()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        signal.alarm(SECONDS)
        answers.write(json.dumps(outcome_of(reader, int(number), place)) + "\n")
        answers.flush()


def main():
    warnings.simplefilter("error", RuntimeWarning)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="jaxinf-fuzz-") as folder:
        place = Path(folder)
        if len(sys.argv) > 2:
            fuzzed_files.seeds(sys.argv[1])
            _limit_memory()
            print(*outcome_of(sys.argv[1], int(sys.argv[2]), place))
        else:
            for reader in READERS:
                fuzzed_files.seeds(reader)
            _limit_memory()
            _serve(place)


if __name__ == "__main__":
    main()
