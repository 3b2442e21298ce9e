"""The tests' own kernels, as tables of arguments."""

from swemu.build import HERE
from swemu.table import Kernel

from jaxinf.kernels.card_kernels import CardArgument

__all__ = ["ADAM", "CRASH", "KERNELS", "MEET", "SCALE", "SOURCES"]

SOURCES = sorted((HERE / "kernels").glob("*.cpp"))


def _kernel(name: str, **types: str) -> Kernel:
    """A kernel with arguments of these types, pointers marked by a star."""
    arguments = []
    for argument, type_ in types.items():
        kind = "pointer" if type_.endswith("*") else "scalar"
        arguments.append(CardArgument(argument, kind, type_.removesuffix("*")))
    return Kernel(name, tuple(arguments))


ADAM = _kernel(
    "adam", params="float32*", mu="float32*", nu="float32*", gradient="float32*",
    num_words="uint32", rate="float32", correction1="float32", correction2="float32",
)  # fmt: skip
SCALE = _kernel(
    "scale", input="float32*", output="float32*", num_elements="uint32",
    factor="float32", offset="int32",
)  # fmt: skip
MEET = _kernel("meet", counter="int32*", wanted="uint32")
CRASH = _kernel("crash", nothing="int32*")
KERNELS = (ADAM, SCALE, MEET, CRASH)
