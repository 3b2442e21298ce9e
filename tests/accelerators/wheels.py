"""Gets JAX's plugins for CUDA and TPU into a cache of this machine; prints its folder.

Compiling needs no driver and no toolkit, so only the plugins themselves are downloaded:
those that JAX's own extras name. They go into a folder of their own, because JAX starts
whatever plugin it finds in its environment.

    python tests/accelerators/wheels.py
"""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("cuda12-local", "tpu")
NAMES = ("jax-cuda12-plugin", "libtpu")


def requirements():
    """Returns the plugins that fit the installed JAX, and the CUDA plugin's library."""
    found = set()
    for one in map(Requirement, metadata.requires("jax") or ()):
        marker = one.marker
        if one.name not in NAMES or marker is None:
            continue
        if any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
            found.add(f"{one.name}{one.specifier}")
            if one.name == "jax-cuda12-plugin":
                found.add(f"jax-cuda12-pjrt{one.specifier}")
    return found


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = cache / "jaxinf" / f"plugins-{metadata.version('jax')}-{python}"
    if not place.exists():
        part = place.with_name(f"{place.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--target", str(part), *sorted(requirements())]
        print(f"downloading 0.5 GB into {place}", file=sys.stderr)
        subprocess.run(command, check=True)
        part.rename(place)
    print(place)


if __name__ == "__main__":
    main()
