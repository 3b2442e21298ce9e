"""XLA's CPU client and its compilers: threads, fusions, the same bits in each run.

Invariant: what the user has set in the environment stays.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax

CPU_THREADS_VARIABLE = "PJRT_NPROC"
"""The environment variable with the number of threads of XLA's CPU client."""


def cpu_client_threads() -> int:
    """Returns the requested threads of XLA's CPU client; 0 if the user set none."""
    setting = os.environ.get(CPU_THREADS_VARIABLE) or os.environ.get("NPROC") or "0"
    return int(setting) if setting.isdigit() else 0


LIBRARY_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
"""An option of XLA's CPU compiler: what its library of kernels computes."""

_WITHOUT_REDUCTIONS = (
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
)

_DETERMINISTIC = "xla_gpu_deterministic_ops"  # with two hyphens, of ``XLA_FLAGS``

_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
_NO_TILES = "Couldn't find output tile sizes"


def without_library_reductions() -> dict[str, Any] | None:
    """Returns options for XLA's CPU compiler that keep reductions from YNNPACK.

    Products and convolutions go there, as by default. None if this XLA does not know
    the option, or if the user has set it in ``XLA_FLAGS``.
    """
    if LIBRARY_FUSIONS in _xla_flags():
        return None
    options = {LIBRARY_FUSIONS: _WITHOUT_REDUCTIONS}
    return options if _is_compiled_with(LIBRARY_FUSIONS, _WITHOUT_REDUCTIONS) else None


def deterministic_options(is_wanted: bool) -> dict[str, Any] | None:
    """Returns options with which a program has the same bits in each run.

    They make a GPU add in a fixed order, and choose kernels without measuring them.
    None elsewhere, if they are not wanted, or if the user has chosen in ``XLA_FLAGS``.
    """
    varies = jax.default_backend() == "gpu" and _DETERMINISTIC not in _xla_flags()
    return {_DETERMINISTIC: True} if is_wanted and varies else None


def compile_lowered(lowered: Any, options: Mapping[str, Any] | None) -> Any:
    """Compiles what JAX has lowered; blocks.

    Without measuring, XLA finds no tiles for some products in Triton's kernels, as of a
    ViT for an A100. These programs, which are the same in each run, get cuBLAS's.
    """
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
    return lowered.compile(compiler_options={**(options or {}), **_WITHOUT_TRITON})


def memory_registry(device: Any) -> Any:
    """Returns XLA's client of a GPU, if it can register memory of the host.

    It has `dma_map(address, size)` and `dma_unmap(address)`; `jax.device_put` copies
    registered memory without a copy in between.
    """
    if device.platform not in ("cuda", "gpu"):
        return None
    client = device.client
    is_known = hasattr(client, "dma_map") and hasattr(client, "dma_unmap")
    return client if is_known else None


def _xla_flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


@functools.cache
def _is_compiled_with(option: str, value: str) -> bool:
    lowered = jax.jit(lambda: jax.numpy.zeros(())).lower()
    try:
        lowered.compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
