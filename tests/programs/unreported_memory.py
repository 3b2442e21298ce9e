"""Prints by how much each program's resident memory grows, less what XLA reports."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxinf.streaming.plan.cut_to_fit import cut_to_fit
from jaxinf.streaming.program.lifetimes import order_program
from jaxinf.streaming.program.programs import compile_program


def status_bytes(name):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


def loss(p, x):
    return jnp.sum(jnp.tanh(jnp.sum(p * x, -1)))


def main():
    """Runs each program of the loss and its gradient."""
    like = jax.ShapeDtypeStruct((1, 2, 3072, 3072), jnp.float32)
    for program in cut_to_fit(
        order_program(loss, like, like), 1 << 40
    ).programs.values():
        compiled = compile_program(program)
        args = [jnp.ones(value.shape, value.dtype) for value in program.inputs]
        for _ in range(3):
            jax.block_until_ready(compiled(*args))
        Path("/proc/self/clear_refs").write_text("5")
        before_bytes = status_bytes("VmRSS")
        jax.block_until_ready(compiled(*args))
        memory = compiled.memory_analysis()
        reported_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
        print(status_bytes("VmHWM") - before_bytes - reported_bytes)


if __name__ == "__main__":
    main()
