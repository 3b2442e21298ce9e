"""Every small change of a JSON document: of a type, a number, a key, an item."""

import copy

SAMPLES = (None, True, 1.5, 7, "x", [], {})
NUMBERS = (-1, 1 << 63)


def changes(document):
    """Yields pairs of what was changed, as a path and a word, and the new document."""
    for path, value in nodes(document):
        for kind, new in replacements(value):
            yield (path, kind), _replaced(document, path, new)
        if isinstance(value, dict):
            yield (path, "unknown key"), _replaced(document, path, {**value, "?": 1})
            for key in value:
                left = {k: v for k, v in value.items() if k != key}
                yield ((*path, key), "dropped"), _replaced(document, path, left)
        if isinstance(value, list) and value:
            yield (path, "item dropped"), _replaced(document, path, value[1:])
            yield (path, "item twice"), _replaced(document, path, [*value, value[0]])


def nodes(value, path=()):
    """Yields the path and the value of everything in a document."""
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from nodes(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from nodes(item, (*path, number))


def replacements(value):
    """Yields values of every other type, and numbers out of any range."""
    for sample in SAMPLES:
        if type(sample) is not type(value):
            yield f"made {type(sample).__name__}", sample
    if type(value) is str:
        yield "other text", "1" + value
    if type(value) is int:
        yield "one more", value + 1
        for number in NUMBERS:
            yield f"made {number}", number


def _replaced(document, path, new):
    if not path:
        return new
    changed = copy.deepcopy(document)
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = new
    return changed
