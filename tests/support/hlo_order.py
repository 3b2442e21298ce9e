"""Who needs whom among the instructions of a scheduled computation of XLA.

Invariant: instructions are numbered in the order in which they are scheduled.
"""

import re

_DEFINED = re.compile(r"^\s*(?:ROOT )?(%[\w.\-]+) = ")
_NAME = re.compile(r"%[\w.\-]+")
_WAITS = re.compile(r" (conditional|while|infeed|outfeed)\(")


def all_operands(lines):
    """Returns, for each instruction, the numbers of those it needs, however far."""
    places: dict[str, int] = {}
    needed: list[set[int]] = []
    for number, line in enumerate(lines):
        match = _DEFINED.match(line)
        own: set[int] = set()
        if match is not None:
            for name in _NAME.findall(line[match.end() :]):
                if name in places:
                    own |= {places[name], *needed[places[name]]}
            places[match[1]] = number
        needed.append(own)
    return needed


def computations(text):
    """Returns the lines of each computation of a module; ``ENTRY`` is the main one."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0]
            found[name] = []
        elif found:
            found[name].append(line)
    return found


def called_lines(line, found):
    """Returns the lines of the computations that an instruction calls, however far."""
    own = [one for name in _NAME.findall(line) for one in found.get(name, ())]
    return own + [further for one in own for further in called_lines(one, found)]


def numbers(lines, pattern):
    """Returns the numbers of the instructions that a pattern is found in."""
    found = re.compile(pattern)
    return [number for number, line in enumerate(lines) if found.search(line)]


def synchronising(lines):
    """Returns the instructions for which the host waits, as far as XLA has any.

    It reads the predicate of a conditional and of a loop. Callbacks are counted apart.
    """
    found = []
    for line in lines:
        match = _WAITS.search(line)
        name = re.search(r'op_name="([^"]*)"', line)
        if match is not None:
            found.append(f"{match[1]} {name[1] if name else ''}".strip())
    return found
