"""Errors of gradients when values wait on the drive in fewer bits.

    python scripts/activation_forms.py --store DIR

Each model runs one step in which all values leave that can: in bf16, and in int8
blocks. An error is the norm of the difference over the norm of the gradients with
"keep": of all params together, of the median leaf and of the worst one. The latter two
leave out leaves with less than a thousandth of the norm: the gradient of attention's
key bias, which is zero in theory, is noise. The loss must have the bits of "keep".
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxinf_models import MODELS, loss

from jaxinf.streaming.move.params import MemoryParams
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.calls import Calls
from jaxinf.streaming.plan.forms import FORMS, Form
from jaxinf.streaming.plan.offload import fitted
from jaxinf.streaming.plan.plan import prepare
from jaxinf.streaming.run import Executables, Runner

MODEL_NAMES = ("gpt2", "llama", "bloom")
SMALL_SHARE = 1e-3


class Stepper:
    """One model, cut into programs, and its gradients in each form of values."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        family = MODELS[name]
        config = family.presets[arguments.preset]
        graphdef, params = nnx.split(family.model_type(config, rngs=nnx.Rngs(0)))
        self.params = nnx.to_pure_dict(params)
        rng = np.random.default_rng(1)
        shape = (arguments.batch, arguments.length + 1)
        self.tokens = rng.integers(0, config.vocab_size, shape).astype(np.int32)

        def loss_fn(params: Any, tokens: Any) -> jax.Array:
            model = nnx.merge(graphdef, params)
            return loss(model, tokens[:, :-1], tokens[:, 1:])

        ready = prepare(loss_fn, self.params, self.tokens)
        self.plan = ready.plan(2 * ready.smallest_bytes("offload"), "offload")
        self.place: Path = arguments.store
        self.executables: Executables = {}

    def keep(self) -> tuple[float, list[np.ndarray]]:
        """Loss and gradients with all values in memory."""
        return self._step(self.plan.calls, Values())

    def coded(self, form: Form | None) -> tuple[float, list[np.ndarray], int]:
        """Loss, gradients and bytes on the drive, when all values leave that can."""
        calls = fitted(replace(self.plan.calls, form=form), 0, Calls.value_bytes)
        values = Values(calls, Scratch([self.place]))
        found = self._step(calls, values)
        values.close()
        return *found, values.num_bytes

    def _step(self, calls: Calls, values: Values) -> tuple[float, list[np.ndarray]]:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.params)]
        gradients = [np.zeros(leaf.shape, np.float32) for leaf in leaves]

        def hand_out(piece: Any, gradient: jax.Array) -> None:
            piece.of(gradients[piece.leaf])[...] = gradient

        plan = replace(self.plan, calls=calls)
        params = MemoryParams(lambda: leaves)
        params.begin(lambda: None)
        runner = Runner(plan, self.executables, values=values)
        found, _ = runner(self.tokens, params, hand_out)
        return float(np.asarray(found)), gradients


def errors(
    found: list[np.ndarray], expected: list[np.ndarray]
) -> tuple[float, float, float]:
    """The relative errors of all gradients, of the median leaf and of the worst."""
    norms = [float(np.linalg.norm(one)) for one in expected]
    wrong = [
        float(np.linalg.norm(one - two))
        for one, two in zip(found, expected, strict=True)
    ]
    whole = float(np.linalg.norm(norms))
    shares = [
        one / norm
        for one, norm in zip(wrong, norms, strict=True)
        if norm > SMALL_SHARE * whole
    ]
    return float(np.linalg.norm(wrong)) / whole, statistics.median(shares), max(shares)


def rows(stepper: Stepper) -> Iterator[tuple[str, int, tuple[float, float, float]]]:
    """Measures each form; ends the program if a loss differs."""
    loss, expected = stepper.keep()
    for form in (None, *FORMS):
        own, gradients, num_bytes = stepper.coded(form)
        if own != loss:
            sys.exit(f"{form}: expected the loss of keep, {loss}, found {own}")
        yield form or "exact", num_bytes, errors(gradients, expected)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="place on the drive")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODEL_NAMES)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    arguments.store.mkdir(parents=True, exist_ok=True)
    print(
        f"{'model':8} {'form':6} {'MiB written':>12} "
        f"{'all':>9} {'median':>9} {'worst':>9}"
    )
    for name in arguments.model:
        for form, num_bytes, found in rows(Stepper(name, arguments)):
            cells = " ".join(f"{one:9.1e}" for one in found)
            print(f"{name:8} {form:6} {num_bytes / 2**20:12.2f} {cells}")


if __name__ == "__main__":
    main()
