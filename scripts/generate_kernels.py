"""Writes jaxinf/kernels/generated/: the C++ of the optimizers built into the wheel.

Run it after a change of the emitter, of the lowering or of optax; a test compares.
"""

from jaxinf.kernels.compiled import source_of
from jaxinf.kernels.standard import standard_kernels
from jaxinf.kernels.toolchain import GENERATED, content_hash


def main() -> None:
    GENERATED.mkdir(exist_ok=True)
    kernels = standard_kernels()
    for path in GENERATED.glob("*.cpp"):
        if path.stem not in kernels:
            path.unlink()
            print(f"removed {path.name}")
    for name, kernel in kernels.items():
        path, text = GENERATED / f"{name}.cpp", source_of(kernel, title=f"{name}.")
        # The comment names versions: what only they changed stays as it is.
        if not path.exists() or content_hash(path.read_text()) != content_hash(text):
            path.write_text(text)
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
