"""Gets JAX's plugins for CUDA and TPU into a cache of this machine; prints its folder.

Compiling needs no driver and no toolkit, so only the plugins themselves are downloaded:
those that JAX's own extras name. They go into a folder of their own, because JAX starts
whatever plugin it finds in its environment.

    python tests/accelerators/wheels.py
"""

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("cuda12-local", "tpu")
NAMES = ("jax-cuda12-plugin", "libtpu")


def requirements() -> list[str]:
    """Returns the plugins that fit the installed JAX, and the CUDA plugin's library."""
    found: list[str] = []
    for text in metadata.requires("jax") or ():
        one = Requirement(text)
        if one.name not in NAMES or one.marker is None:
            continue
        if any(one.marker.evaluate({"extra": extra}) for extra in EXTRAS):
            found.append(f"{one.name}{one.specifier}")
            if one.name == "jax-cuda12-plugin":
                found.append(f"jax-cuda12-pjrt{one.specifier}")
    return sorted(set(found))


def folder() -> Path:
    """Returns the folder for this JAX and this Python."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(cache) / "jaxinf" / f"plugins-{metadata.version('jax')}-{python}"


def main() -> None:
    """Downloads them unless they are there."""
    place = folder()
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        wanted = requirements()
        print(
            f"downloading {', '.join(wanted)} into {place}: 0.5 GB, which take 1.2 GB; "
            "once for this version of JAX",
            file=sys.stderr,
        )
        with tempfile.TemporaryDirectory(dir=place.parent) as part:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "--target", f"{part}/made", *wanted], check=True)
            try:
                os.rename(f"{part}/made", place)
            except OSError:
                if not place.exists():  # else another run has made it meanwhile
                    raise
    print(place)


if __name__ == "__main__":
    main()
