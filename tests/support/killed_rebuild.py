"""Makes a lost member of a run again from an export, killed at every kind of place.

As a program it kills a rebuild so many times, at random calls of the operating system,
gives the command again, and looks at what is there.
"""

import functools
import random
import shutil
import signal
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from killed_division import contents, count_calls, damages, make

from jaxinf.cli.commands import main as jaxinf
from jaxinf.exchange import import_into_run
from jaxinf.store import (
    StateRecord,
    StoreDirectory,
    find_members,
    list_whole,
    redivide,
    remove_checkpoint,
    save_whole,
)

PLAIN = StateRecord("mu", "float32")


def make_run(place, num_csds=0, **options):
    path = make(place, num_csds, **options)
    roots = [f"{place}/csd{number}/{{process}}" for number in range(num_csds)]
    redivide(path, 3, roots)
    save_whole(path, "now")
    return path, [word for root in roots for word in ("--csd-root", root)]


def lose(path, number=1):
    directory = StoreDirectory.open(path / f"process-0000{number}")
    for csd in range(len(directory.manifest.csds)):
        shutil.rmtree(directory.csd_directory(csd))
    directory.path.rename(f"{directory.path}.old")


def main(place, num_kills):
    # A process that has used tensorstore may not fork, as the killed one does.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        kill(place, num_kills, lambda *one: other.submit(*one).result())


def kill(place, num_kills, elsewhere):
    rng, seen = random.Random(1), Counter()
    for number in range(num_kills):
        folder = place / str(number)
        path, _ = make_run(folder, mu=PLAIN)
        name, export = ("now", "kept")[number % 2], folder / "export"
        expected = contents(path, name)
        words = ["checkpoint", "export", path, export, "--checkpoint", name]
        assert elsewhere(jaxinf, list(map(str, words))) == 0
        if number % 4 == 3:  # the others have the step from the export alone
            for one in find_members(path):
                remove_checkpoint(StoreDirectory.open(one), "kept")
        lose(path)
        again = functools.partial(
            import_into_run, str(export), path, [1], may_discard=True
        )
        # Few of the calls are after the first commit of the member.
        last = rng.randrange(*((1, 500), (300, 420))[number % 3 == 2])
        status, _ = count_calls(again, last)
        assert status in (0, signal.SIGKILL), status
        is_made = (path / "process-00001/current").exists()
        if status:
            seen["made" if is_made else "lost"] += 1
        if not is_made:
            elsewhere(again)
        words = ["checkpoint", "restore", str(path), str(export)]
        assert elsewhere(jaxinf, words) == 0
        assert contents(path) == expected, number
        kept = [] if number % 4 == 3 else [name]
        assert [info.name for info in list_whole(path)] == kept, number
        assert not damages(path), number
        shutil.rmtree(folder)
    print(f"{sum(seen.values())} kills: {dict(seen)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
