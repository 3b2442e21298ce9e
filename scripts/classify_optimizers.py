"""Finds the optimizers of optax that can run near storage, and their promises.

    python scripts/classify_optimizers.py            # compares docs/optimizers.md
    python scripts/classify_optimizers.py --write    # writes its table

Every public factory of `optax` and `optax.contrib` is called and traced: those whose
annotation says what they return, and those of `CASES`.
"""

import argparse
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import Passes, trace_init, trace_update
from jaxinf.streaming import check_init, passes_for, trace_optimizer

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
BITS = ("adagrad", "adam", "adamw", "lion", "sgd")
"""Optimizers with the bits of jitted optax; tests/kernels/test_bits.py checks them."""

EXACT, NEAR, REFUSED = "bits", "tolerance", "refused"

PARAMS = {
    "bias": jax.ShapeDtypeStruct((3072,), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((50304, 768), jnp.float32),
}
"""Params of a real model's size, so that state that grows with rows is realistic."""


class Case(NamedTuple):
    """Instructions to make and call one transformation.

    Attributes:
      make: Makes the transformation.
      extra_args: Makes the arguments of its update from the params (or their avals).
      descends: Whether its updates descend; others are put before sgd.
      params: Converts the params to the tree that it takes.
    """

    make: Callable[[], Any]
    extra_args: Callable[[Any], Mapping[str, Any]] = lambda params: {}
    descends: bool = False
    params: Callable[[Any], Any] = lambda params: params


# --- Cases --------------------------------------------------------------------------


def _value_fn(params: Any, *_: Any, **__: Any) -> jax.Array:
    return sum((jnp.sum(x * x) / 2 for x in jax.tree.leaves(params)), jnp.float32(0))


def _value(params: Any) -> dict[str, Any]:
    return {"value": jnp.float32(1.0)}


def _line_search(params: Any) -> dict[str, Any]:
    grad = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return {**_value(params), "grad": grad, "value_fn": _value_fn}


def _every_second(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _decayed(update: Any, param: Any) -> Any:
    return update + 0.1 * param


def _norms(updates: Any, *_: Any) -> Any:
    return jax.tree.map(lambda u: jnp.sqrt(jnp.sum(u * u)), updates)


_KERNELS = {"bias": False, "kernel": True}
_BIASES = {"bias": True, "kernel": False}
_CONTRIB = optax.contrib
_ADAM = optax.scale_by_adam

CASES = {
    "MultiSteps": Case(lambda: optax.MultiSteps(_ADAM(), 2)),
    "adaptive_grad_clip": Case(lambda: optax.adaptive_grad_clip(0.1)),
    "add_noise": Case(lambda: optax.add_noise(0.01, 0.5, jax.random.key(0))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(_ADAM(), 3)),
    "chain": Case(lambda: optax.chain(_ADAM())),
    "clip": Case(lambda: optax.clip(0.5)),
    "clip_by_block_rms": Case(lambda: optax.clip_by_block_rms(0.5)),
    "clip_by_global_norm": Case(lambda: optax.clip_by_global_norm(0.5)),
    "conditionally_mask": Case(
        lambda: optax.conditionally_mask(_ADAM(), _every_second)
    ),
    "conditionally_transform": Case(
        lambda: optax.conditionally_transform(_ADAM(), _every_second)
    ),
    "ema": Case(lambda: optax.ema(0.9)),
    "flatten": Case(lambda: optax.flatten(_ADAM())),
    "freeze": Case(lambda: optax.freeze(_BIASES)),
    "inject_hyperparams": Case(lambda: optax.inject_hyperparams(_ADAM)(b1=0.8)),
    "inject_stateful_hyperparams": Case(
        lambda: optax.inject_stateful_hyperparams(_ADAM)(b1=0.8)
    ),
    "lbfgs": Case(optax.lbfgs, _line_search, descends=True),
    "lookahead": Case(
        lambda: optax.lookahead(optax.adam(0.1), 2, 0.5),
        descends=True,
        params=lambda params: optax.LookaheadParams(params, params),
    ),
    "masked": Case(lambda: optax.masked(_ADAM(), _KERNELS)),
    "measure_with_ema": Case(lambda: optax.measure_with_ema(_norms, 0.9)),
    "monitor": Case(lambda: optax.monitor({"norm": optax.tree.norm})),
    "multi_transform": Case(
        lambda: optax.multi_transform(
            {True: _ADAM(), False: optax.identity()}, _KERNELS
        )
    ),
    "named_chain": Case(lambda: optax.named_chain(("adam", _ADAM()))),
    "noisy_sgd": Case(
        lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)), descends=True
    ),
    "partition": Case(
        lambda: optax.partition({True: _ADAM(), False: optax.identity()}, _KERNELS)
    ),
    "polyak_sgd": Case(optax.polyak_sgd, _value, descends=True),
    "scale": Case(lambda: optax.scale(0.5)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.scale_by_backtracking_linesearch(3), _line_search
    ),
    "scale_by_factored_rms": Case(optax.scale_by_factored_rms),
    "scale_by_learning_rate": Case(
        lambda: optax.scale_by_learning_rate(0.1), descends=True
    ),
    "scale_by_polyak": Case(optax.scale_by_polyak, _value),
    "scale_by_rprop": Case(lambda: optax.scale_by_rprop(0.1)),
    "scale_by_schedule": Case(lambda: optax.scale_by_schedule(lambda n: 1 / (1 + n))),
    "scale_by_zoom_linesearch": Case(
        lambda: optax.scale_by_zoom_linesearch(3), _line_search
    ),
    "selective_transform": Case(
        lambda: optax.selective_transform(_ADAM(), freeze_mask=_BIASES)
    ),
    "snapshot": Case(lambda: optax.snapshot("norm", optax.tree.norm)),
    "stateless": Case(
        lambda: optax.stateless(lambda u, p: jax.tree.map(lambda x: x / 2, u))
    ),
    "stateless_with_tree_map": Case(lambda: optax.stateless_with_tree_map(_decayed)),
    "trace": Case(lambda: optax.trace(0.9)),
    "with_extra_args_support": Case(lambda: optax.with_extra_args_support(_ADAM())),
    "contrib.differentially_private_aggregate": Case(
        lambda: _CONTRIB.differentially_private_aggregate(1.0, 0.1, jax.random.key(0))
    ),
    "contrib.dog": Case(lambda: _CONTRIB.dog(0.1), descends=True),
    "contrib.dowg": Case(lambda: _CONTRIB.dowg(0.1), descends=True),
    "contrib.dpsgd": Case(lambda: _CONTRIB.dpsgd(0.1, 1.0, 0.1, 0), descends=True),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        _CONTRIB.hutchinson_estimator_diag_hessian, lambda _: {"obj_fn": _value_fn}
    ),
    "contrib.mechanize": Case(
        lambda: _CONTRIB.mechanize(optax.sgd(0.1)), descends=True
    ),
    "contrib.momo": Case(_CONTRIB.momo, _value, descends=True),
    "contrib.momo_adam": Case(_CONTRIB.momo_adam, _value, descends=True),
    "contrib.reduce_on_plateau": Case(_CONTRIB.reduce_on_plateau, _value),
    "contrib.sam": Case(
        lambda: _CONTRIB.sam(
            optax.sgd(0.1), optax.chain(_CONTRIB.normalize(), optax.sgd(0.05))
        ),
        descends=True,
    ),
    "contrib.scale_by_muon": Case(
        lambda: _CONTRIB.scale_by_muon(
            weight_dimension_numbers=lambda params: jax.tree.map(
                lambda _: _CONTRIB.MuonDimensionNumbers(), params
            )
        ),
        params=lambda params: {"kernel": params["kernel"]},
    ),
    "contrib.schedule_free": Case(
        lambda: _CONTRIB.schedule_free(optax.sgd(0.1), 0.1), descends=True
    ),
    "contrib.simplified_ademamix": Case(
        lambda: _CONTRIB.simplified_ademamix(0.01), descends=True
    ),
    "contrib.sophia": Case(
        lambda: _CONTRIB.sophia(0.1), lambda _: {"obj_fn": _value_fn}, descends=True
    ),
    "contrib.split_real_and_imaginary": Case(
        lambda: _CONTRIB.split_real_and_imaginary(_ADAM())
    ),
}
"""Factories that need more than a learning rate, or do not say what they return."""

_SGD = {"momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}


def cases() -> dict[str, Case]:
    """Returns a case for every factory, by the name after ``optax.``, in order.

    Raises:
      LookupError: a factory needs arguments that this script does not know, or is gone.
    """
    result, found = {}, set()
    for prefix, namespace in (("", optax), ("contrib.", optax.contrib)):
        for name, value in vars(namespace).items():
            found.add(prefix + name)
            if prefix + name in CASES:
                result[prefix + name] = CASES[prefix + name]
            elif _is_factory(name, value):
                result[prefix + name] = _case_of(prefix + name, value)
    if gone := sorted(CASES.keys() - found):
        raise LookupError(
            f"optax {optax.__version__} has no {', '.join(gone)}: remove them from "
            "CASES in this script"
        )
    for form, options in _SGD.items():
        result[f"sgd, {form}"] = Case(
            lambda options=options: optax.sgd(0.1, **options), descends=True
        )
    return dict(sorted(result.items(), key=lambda item: item[0].split(".")[::-1]))


def _is_factory(name: str, value: Any) -> bool:
    if name.startswith("_") or inspect.isclass(value) or not callable(value):
        return False
    try:
        annotation = inspect.signature(value).return_annotation
    except ValueError:
        return False
    return "GradientTransformation" in str(annotation)


def _case_of(name: str, factory: Callable[..., Any]) -> Case:
    parameters = list(inspect.signature(factory).parameters.values())
    required = {p.name for p in parameters if p.default is p.empty}
    if parameters and parameters[0].name == "learning_rate":
        if required <= {"learning_rate"}:
            return Case(lambda: factory(0.1), descends=True)
    elif not required:
        return Case(factory)
    raise LookupError(
        f"optax.{name}: new to this script, and it needs {', '.join(required)}; add "
        "it to CASES"
    )


# --- The page -----------------------------------------------------------------------


def classify(name: str, case: Case) -> tuple[str, ...]:
    """Traces one transformation; returns the cells of its line behind the name."""
    params = case.params(PARAMS)
    notes = [f"needs {', '.join(f'`{n}`' for n in sorted(case.extra_args(params)))}"]
    try:
        with warnings.catch_warnings(action="ignore"):  # optax's deprecations
            tx = case.make()
            program = trace_update(tx, params, case.extra_args(params))
            trace_init(tx, params)
    except UnsupportedTransformError as error:
        reason = str(error).partition("found ")[2].partition(";")[0].partition(": ")[0]
        if "bytes" in reason:
            reason = f"state of other shapes than the params': {reason.split(',')[0]}"
        return REFUSED, passes(case), "", "", reason
    except Exception as error:  # optax may raise anything
        return REFUSED, REFUSED, "", "", f"optax: {str(error).splitlines()[0]}"
    leaf = program.leaves[-1]
    if num := len(leaf.kernel.array_dtypes):
        notes.append(f"arrays of the leaf's shape that the JAX device computes: {num}")
    return (
        EXACT if name.split(",")[0] in BITS else NEAR,
        passes(case),
        str(sum(slot.dtype.itemsize for slot in leaf.slots)),
        ", ".join(f"`{slot.name}`" for slot in leaf.slots),
        "; ".join(note for note in notes if note != "needs "),
    )


def passes(case: Case) -> str:
    """Returns how `jaxinf.stream` runs an optimizer, in words for the table."""
    params = case.params(PARAMS)
    try:
        with warnings.catch_warnings(action="ignore"):  # optax's deprecations
            tx = case.make()
            program = trace_optimizer(tx, params, case.extra_args(params))
            check_init(trace_init(tx, params))
            found = passes_for(program)
    except Exception:  # optax may raise anything; the refusal is among the remarks
        return REFUSED
    words = ["at once" if found.num_passes == 1 else f"{found.num_passes} passes"]
    if reads_state(found):
        words.append("state twice")
    return ", ".join(words)


def reads_state(found: Passes) -> bool:
    """Whether a pass reads stored state before the kernel does."""
    own = (value for part in found.parts.values() for value in part.own)
    return any(value in found.recalled for value in own)


def rendered(page: str) -> str:
    """Returns the page with its table renewed."""
    order = (EXACT, NEAR, REFUSED)
    rows = [(name, *classify(name, case)) for name, case in cases().items()]
    rows.sort(key=lambda row: order.index(row[1]))
    counts = [f"{sum(r[1] == kind for r in rows)} {kind}" for kind in order]
    lines = [
        f"optax {optax.__version__}: {', '.join(counts)}.",
        "",
        "| transformation | near storage | streamed | state, bytes a param | stored | "
        "remarks |",
        "|---|---|---|---|---|---|",
    ]
    for name, *cells in rows:
        function, comma, form = name.partition(",")
        lines.append(f"| `{function}`{comma}{form} | {' | '.join(cells)} |")
    begin = "<!-- begins: written by scripts/classify_optimizers.py -->"
    end = "<!-- ends -->"
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])


def main(*, write: bool) -> int:
    """Writes or compares the page; returns the exit status."""
    page = PAGE.read_text()
    new = rendered(page)
    if write:
        PAGE.write_text(new)
    elif new != page:
        print(f"{PAGE} is not up to date; run python {sys.argv[0]} --write")
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    sys.exit(main(write=parser.parse_args().write))
