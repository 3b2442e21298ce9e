"""Writes the C++ that is emitted from optax: for hosts and for cards.

Without arguments, all of ``jaxinf/native/generated`` and, for the card kernels that
``hls/kernels.txt`` names, ``hls/generated``. With names of card kernels, only those.
Run it after a change of the emitter, of the lowering or of optax; tests compare.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import optax

from jaxinf.kernels.card_kernels import named_card_kernel
from jaxinf.kernels.card_source import card_source
from jaxinf.kernels.compiled import standard_kernels
from jaxinf.kernels.emitter import emit
from jaxinf.native.toolchain import GENERATED, content_hash
from jaxinf.program import Kernel

HLS = Path(__file__).parents[1] / "hls"


def main() -> None:
    if names := sys.argv[1:]:
        for name in names:
            write(HLS / "generated" / f"{name}.cpp", card_text(name))
        return
    kernels = standard_kernels()
    texts = {name: host_text(name, kernel) for name, kernel in kernels.items()}
    # A file that differs only in its comment is not rewritten.
    write_all(GENERATED, texts, content_hash)
    lines = (HLS / "kernels.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    write_all(HLS / "generated", {name: card_text(name) for name in listed})


def host_text(name: str, kernel: Kernel) -> str:
    versions = f"jax {jax.__version__}, optax {optax.__version__}"
    lines = [f"{name}.", "", f"Emitted by jaxinf from these equations ({versions}):"]
    lines += ["", *(f"  {line}" for line in kernel.describe())]
    lines += ["", "# stands for a literal: c0, c1, ... below, in order of use."]
    comment = "".join(f"// {line}".rstrip() + "\n" for line in lines)
    return comment + emit(kernel).text


def card_text(name: str) -> str:
    return card_source([named_card_kernel(name)])


def write_all(
    folder: Path,
    texts: Mapping[str, str],
    identity: Callable[[str], str] = lambda text: text,
) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.cpp"):
        if path.stem not in texts:
            path.unlink()
            print(f"removed {path.name}")
    for name, text in texts.items():
        path = folder / f"{name}.cpp"
        if not path.exists() or identity(path.read_text()) != identity(text):
            write(path, text)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
