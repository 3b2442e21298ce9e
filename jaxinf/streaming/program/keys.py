"""Canonical texts of nodes and programs: equal texts are equal computations.

Invariant: two programs have the same key only if they can share an executable. What has
no value to compare, such as a function or a mesh, is compared as an object.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.program import Node, Value
from jaxinf.streaming.program.meshes import typed_sharding

_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic, np.dtype)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_OBJECT = re.compile(r"#\d+")


def stable_digest(lines: Iterable[str]) -> str:
    """Returns a digest of `lines` that is the same in every process."""
    return _digest(_OBJECT.sub("", line) for line in lines)


def _digest(lines: Iterable[str]) -> str:
    """Digests line by line: the text of a deep model would take tens of MB."""
    digest, separator = hashlib.sha256(), b""
    for line in lines:
        digest.update(separator + line.encode())
        separator = b"\n"
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Keys:
    """Texts of nodes and programs of one graph.

    Attributes:
      texts: Objects and their texts by id; holding an object keeps its id unique.
      objects: Numbers of objects that are compared, or of their ids.
    """

    texts: dict[int, tuple[Any, str]] = field(default_factory=dict)
    objects: dict[Any, int] = field(default_factory=dict)

    def node(self, node: Node) -> str:
        """Returns the text of a node's computation and of its operands' types."""
        return self._once(node, self._node)

    def _node(self, node: Node) -> str:
        inputs = ",".join(map(self._input, node.inputs))
        outputs = ",".join(_aval(value.aval) for value in node.outputs)
        static = f"{self._once(node.params)}{self._once(node.context)}"
        text = f"{node.name}{static}({inputs})->{outputs}"
        return sys.intern(text)  # equal blocks have equal nodes

    def program(
        self, inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value]
    ) -> str:
        """Returns a program's key; equal programs of one graph have equal keys."""
        return _digest(self.describe(inputs, nodes, outputs))

    def describe(
        self, inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value]
    ) -> Iterator[str]:
        """Yields the text of a program's computation: nodes with numbered values."""
        numbers = {value: i for i, value in enumerate(inputs)}

        def read(value: Value) -> str:
            return str(numbers[value]) if value in numbers else self._input(value)

        yield ",".join(_aval(value.aval) for value in inputs)
        for node in nodes:
            yield f"{self.node(node)}<{','.join(map(read, node.inputs))}"
            for value in node.outputs:
                numbers[value] = len(numbers)
        yield ",".join(map(read, outputs))

    def _input(self, value: Value) -> str:
        text = _aval(value.aval)
        if value.constant is None:
            return text
        return f"{text}={self._text(value.constant)}"

    def _once(self, item: Any, write: Callable[[Any], str] | None = None) -> str:
        """Returns an object's text, made once for the iterations of a scan."""
        if id(item) not in self.texts:
            self.texts[id(item)] = (item, (write or self._text)(item))
        return self.texts[id(item)][1]

    def _text(self, item: Any) -> str:
        if isinstance(item, compat.ClosedJaxpr):
            consts = ",".join(map(self._text, item.consts))
            return f"{self._jaxpr(item.jaxpr)}[{consts}]"
        if isinstance(item, compat.Jaxpr):
            return self._jaxpr(item)
        if isinstance(item, np.integer):
            return f"int:{int(item)}"
        if isinstance(item, _PLAIN):
            return f"{type(item).__name__}:{item!r}"
        if isinstance(item, Mapping):
            return f"{{{','.join(f'{k}:{self._text(v)}' for k, v in item.items())}}}"
        if isinstance(item, Set):
            return f"{{{','.join(sorted(map(self._text, item)))}}}"
        if isinstance(item, (tuple, list)):
            return f"({','.join(map(self._text, item))})"
        if _is_plain_array(item):
            array = np.asarray(item)
            digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            return f"array:{array.dtype}{array.shape}{digest}"
        return self._object(item)

    def _object(self, item: Any) -> str:
        """Returns the text of an object: its name, and one number for equal ones."""
        try:
            number = self.objects.setdefault(item, len(self.objects))
        except TypeError:  # not hashable: itself only
            number = self.objects.setdefault(id(item), len(self.objects))
        name = f"{type(item).__qualname__}:{_ADDRESS.sub('', repr(item))}"
        self.texts[id(item)] = item, f"{name}#{number}"
        return f"{name}#{number}"

    def _jaxpr(self, jaxpr: Any) -> str:
        numbers: dict[Any, int] = {}

        def write(var: Any) -> str:
            return f"{numbers.setdefault(var, len(numbers))}:{_aval(var.aval)}"

        def read(atom: Any) -> str:
            if isinstance(atom, compat.Literal):
                return f"{_aval(atom.aval)}={self._text(atom.val)}"
            return str(numbers[atom])

        lines = [",".join(map(write, (*jaxpr.constvars, *jaxpr.invars)))]
        for eqn in jaxpr.eqns:
            static = f"{self._once(eqn.params)}{self._once(eqn.ctx)}"
            read_text = ",".join(map(read, eqn.invars))
            wrote = ",".join(map(write, eqn.outvars))
            lines.append(f"{eqn.primitive.name}{static}({read_text})->{wrote}")
        lines.append(",".join(map(read, jaxpr.outvars)))
        return f"<{';'.join(lines)}>"


def _is_plain_array(item: Any) -> bool:
    """Whether an item has numbers to compare: an array, or a literal of JAX."""
    if isinstance(item, type) or not hasattr(item, "__array__"):
        return False
    return not jnp.issubdtype(item.dtype, jax.dtypes.extended)


def _aval(aval: Any) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    shape = ",".join(map(str, getattr(aval, "shape", ())))
    typed = typed_sharding(aval)
    on = "" if typed is None else f"@{typed.spec}{typed.mesh.shape_tuple}"
    return f"{_name(getattr(aval, 'dtype', aval))}{weak}[{shape}]{on}"


@cache  # NumPy makes a dtype's name anew each time
def _name(dtype: Any) -> str:
    return str(dtype)
