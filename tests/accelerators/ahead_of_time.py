"""Compiles programs for accelerators that this machine does not have.

XLA compiles for a device that is described in text, without a driver. What needs
JAX's private parts is here. A callback is compiled into a program that nothing can run:
it is lowered without the client of its platform, which is not there.

Invariant: nothing runs for an accelerator; arguments are shapes.
"""

import contextlib
import functools
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DESCRIPTIONS = Path(__file__).with_name("devices")
CUDA_DEVICES = ("h100", "a100", "rtx4090")
# Neither asks a metadata server where it runs, nor where its neighbours are.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs on a TPU
for _name, _value in (
    ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
):
    os.environ.setdefault(_name, _value)


@dataclass(frozen=True)
class Target:
    """A kind of device: ``v5e``, or a file in ``tests/accelerators/devices``."""

    name: str
    num_devices: int = 1

    @property
    def platform(self):
        return "cuda" if self.name in CUDA_DEVICES else "tpu"

    @functools.cached_property
    def devices(self):
        return _devices(self.name, self.num_devices)[: self.num_devices]

    @property
    def alone(self):
        return SingleDeviceSharding(self.devices[0])

    def mesh(self, **axes):
        shape = tuple(axes.values())
        return Mesh(np.array(self.devices).reshape(shape), tuple(axes))


@functools.cache
def _devices(name, num_devices):
    if name == "v5e":
        return topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:2x2"
        ).devices
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=(DESCRIPTIONS / f"{name}.txtpb").read_text(),
        topology=f"1x1x{num_devices}",
    ).devices


@dataclass(frozen=True)
class Built:
    text: str  # the optimized HLO, in the order in which it is scheduled
    ptx: str  # empty for a TPU
    memory: Any
    donated: tuple[int, int]  # arguments, and their bytes

    @property
    def num_aliased(self):
        header = self.text.partition("\n")[0]
        return header.count("-alias)")

    @property
    def entry(self):
        return self.text[self.text.index("\nENTRY ") :].splitlines()[2:]

    @property
    def float_atomics(self):
        """Additions whose order, and so whose bits, differ from run to run.

        A compare-and-swap is one: XLA adds so where there is no instruction.
        """
        found = re.findall(r"\b(?:atom|red)\.\S+", self.ptx)
        return [x for x in found if re.search(r"\bcas\b|\bb?f(16|32|64)", x)]

    @property
    def callbacks(self):
        """The calls of the host, on CUDA; on a TPU its transfers to the host."""
        calls = r"xla_ffi_python_gpu_callback|is_host_transfer=true"
        return [x for x in self.text.splitlines() if re.search(calls, x)]


@contextlib.contextmanager
def compiling_for(target):
    """Lets jaxinf see the target's platform; yields what is compiled there.

    JAX lowers callbacks without the platform, and gives XLA none of them.
    """
    found: list[Built] = []
    get_backend = mlir.ModuleContext.get_backend
    compile_and_load = compiler.backend_compile_and_load
    compile_lowered = jax.stages.Lowered.compile

    def backend_or_none(self, optional=False):
        return None if self.platforms[0] == "cuda" else get_backend(self, optional)

    def without_callbacks(backend, module, devices, options, callbacks):
        del callbacks  # the number of each is in the program
        return compile_and_load(backend, module, devices, options, ())

    def noted(self, compiler_options=None):
        if target.platform == "tpu":
            return note(self, dict(compiler_options or {}))
        with tempfile.TemporaryDirectory() as dump:
            return note(self, {**(compiler_options or {}), "xla_dump_to": dump}, dump)

    def note(lowered, options, dump=None):
        result = compile_lowered(lowered, compiler_options=options)
        files = [] if dump is None else sorted(Path(dump).glob("*.ptx"))
        ptx = "".join(path.read_text() for path in files)
        memory = result.memory_analysis()
        given = [x for x in jax.tree.leaves(lowered.args_info) if x.donated]
        num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in given)
        donated = len(given), num_bytes
        found.append(Built(result.as_text(), ptx, memory, donated))
        return result

    patched = mock.patch.object
    shown = "gpu" if target.platform == "cuda" else target.platform
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(jax, "default_backend", lambda: shown))
        stack.enter_context(patched(jax.stages.Lowered, "compile", noted))
        if target.platform == "cuda":
            replaced = patched(mlir.ModuleContext, "get_backend", backend_or_none)
            stack.enter_context(replaced)
            name = "backend_compile_and_load"
            stack.enter_context(patched(compiler, name, without_callbacks))
        yield found


def compiled(target, function, *arguments, donate=()):
    """Compiles a function for a target.

    Arrays or shapes without a sharding over a mesh are put on the target's first
    device, or replicated over the others' mesh.
    """
    with compiling_for(target) as found:
        given = _placed(target, arguments)
        jax.jit(function, donate_argnums=tuple(donate)).lower(*given).compile()
    return found[-1]


def _placed(target, arguments):
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(arguments)]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    default: Any = target.alone
    if meshes:
        default = NamedSharding(meshes.pop(), PartitionSpec())

    def placed(leaf):
        own = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=own if isinstance(own, NamedSharding) else default,
            weak_type=getattr(leaf, "weak_type", False),
        )

    return jax.tree.map(placed, arguments)
