"""Prints a digest of the bits of each program of the zoo named, and its cuts."""

import hashlib
import sys

from streaming import numbers, prepared, smallest_bytes, streamed
from zoo import ZOO

from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit
from jaxinf.streaming.plan.order import plan_of


def digest(name, cuts=None):
    """The cuts of a plan, and a digest of its program and of what it computes."""
    program = ZOO[name]()
    ready = prepared(program)
    if cuts is None:
        cuts = cut_to_fit(ready, smallest_bytes(ready) * 3 // 2).cuts
    found = numbers(streamed(program, plan_of(ready, cuts), Executables()))
    text = ready.fingerprint.encode() + b"".join(leaf.tobytes() for leaf in found)
    return cuts, hashlib.sha256(text).hexdigest()


def main(*names):
    """Prints name, digest and cuts, a line each."""
    for name in names:
        cuts, text = digest(name)
        print(name, text, *cuts)


if __name__ == "__main__":
    main(*sys.argv[1:])
