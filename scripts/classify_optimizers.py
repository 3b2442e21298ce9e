"""Finds the optimizers of optax that can run near storage, and their promises.

    python scripts/classify_optimizers.py            # compares docs/optimizers.md
    python scripts/classify_optimizers.py --write    # writes its table

Every public factory of `optax` and `optax.contrib` is called and traced: those whose
annotation says what they return, and those of `CALLS`.
"""

import argparse
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import trace_init, trace_update
from jaxinf.streaming import check_init, passes_for

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
    """How to make and call one transformation.

    Params, or their avals, give the arguments of its update and the tree that it takes.
    Where updates do not descend, it is put before sgd.
    """

    make: Callable[[], Any]
    extra_args: Callable[[Any], Mapping[str, Any]]
    descends: bool
    params: Callable[[Any], Any]


# --- Cases --------------------------------------------------------------------------


def _value_fn(params: Any, *_: Any, **__: Any) -> jax.Array:
    return sum((jnp.sum(x * x) / 2 for x in jax.tree.leaves(params)), jnp.float32(0))


def _value(params: Any) -> dict[str, Any]:
    return {"value": jnp.float32(1.0)}


def _line_search(params: Any) -> dict[str, Any]:
    grad = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return {**_value(params), "grad": grad, "value_fn": _value_fn}


def _objective(params: Any) -> dict[str, Any]:
    return {"obj_fn": _value_fn}


def _every_second(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _norms(updates: Any, *_: Any) -> Any:
    return jax.tree.map(lambda u: jnp.sqrt(jnp.sum(u * u)), updates)


def _with_b1(inject: Any) -> Any:
    return inject(optax.scale_by_adam)(b1=0.8)


def _as_matrices(params: Any) -> Any:
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)


_BIASES, _KERNELS = {"bias": True, "kernel": False}, {"bias": False, "kernel": True}
_ADAM, _SGD = optax.scale_by_adam(), optax.sgd(0.1)
_LABELLED = {True: _ADAM, False: optax.identity()}

CALLS: dict[str, tuple[Any, ...] | Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(_ADAM, 2).gradient_transformation(),
    "adaptive_grad_clip": (0.1,),
    "add_noise": lambda: optax.add_noise(0.01, 0.5, jax.random.key(0)),
    "apply_if_finite": (_ADAM, 3),
    "chain": (_ADAM,),
    "clip": (0.5,),
    "clip_by_block_rms": (0.5,),
    "clip_by_global_norm": (0.5,),
    "conditionally_mask": (_ADAM, _every_second),
    "conditionally_transform": (_ADAM, _every_second),
    "ema": (0.9,),
    "flatten": (_ADAM,),
    "freeze": (_BIASES,),
    "inject_hyperparams": lambda: _with_b1(optax.inject_hyperparams),
    "inject_stateful_hyperparams": lambda: _with_b1(optax.inject_stateful_hyperparams),
    "lbfgs": (),
    "lookahead": (optax.adam(0.1), 2, 0.5),
    "masked": (_ADAM, _KERNELS),
    "measure_with_ema": (_norms, 0.9),
    "monitor": ({"norm": optax.tree.norm},),
    "multi_transform": (_LABELLED, _KERNELS),
    "named_chain": (("adam", _ADAM),),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "partition": (_LABELLED, _KERNELS),
    "polyak_sgd": (),
    "scale": (0.5,),
    "scale_by_backtracking_linesearch": (3,),
    "scale_by_factored_rms": (),
    "scale_by_learning_rate": (0.1,),
    "scale_by_polyak": (),
    "scale_by_rprop": (0.1,),
    "scale_by_schedule": (lambda n: 1 / (1 + n),),
    "scale_by_zoom_linesearch": (3,),
    "selective_transform": lambda: optax.selective_transform(
        _ADAM, freeze_mask=_BIASES
    ),
    "snapshot": ("norm", optax.tree.norm),
    "stateless": (lambda u, p: jax.tree.map(lambda x: x / 2, u),),
    "stateless_with_tree_map": (lambda update, param: update + 0.1 * param,),
    "trace": (0.9,),
    "with_extra_args_support": (_ADAM,),
    "contrib.differentially_private_aggregate": lambda: (
        contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0))
    ),
    "contrib.dog": (0.1,),
    "contrib.dowg": (0.1,),
    "contrib.dpsgd": (0.1, 1.0, 0.1, 0),
    "contrib.hutchinson_estimator_diag_hessian": (),
    "contrib.mechanize": (_SGD,),
    "contrib.momo": (),
    "contrib.momo_adam": (),
    "contrib.reduce_on_plateau": (),
    "contrib.sam": (_SGD, optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "contrib.scale_by_muon": lambda: contrib.scale_by_muon(
        weight_dimension_numbers=_as_matrices
    ),
    "contrib.schedule_free": (_SGD, 0.1),
    "contrib.simplified_ademamix": (0.01,),
    "contrib.sophia": (0.1,),
    "contrib.split_real_and_imaginary": (_ADAM,),
    "sgd, momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "sgd, nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
}
"""Arguments of factories that need more than a learning rate, or do not say what they
return; or what makes the transformation. After a comma: a form of one."""

EXTRA_ARGS = {
    "contrib.hutchinson_estimator_diag_hessian": _objective,
    "contrib.momo": _value,
    "contrib.momo_adam": _value,
    "contrib.reduce_on_plateau": _value,
    "contrib.sophia": _objective,
    "lbfgs": _line_search,
    "polyak_sgd": _value,
    "scale_by_backtracking_linesearch": _line_search,
    "scale_by_polyak": _value,
    "scale_by_zoom_linesearch": _line_search,
}
_SHAPED = {
    "lookahead": lambda params: optax.LookaheadParams(params, params),
    "contrib.scale_by_muon": lambda params: {"kernel": params["kernel"]},
}
_DESCENDING = {"lookahead", "polyak_sgd"}
_DESCENDING |= {f"contrib.{name}" for name in ("mechanize", "sam", "schedule_free")}
"""Beside optimizers whose first argument is a learning rate."""


def cases() -> dict[str, Case]:
    """Returns a case for every factory, by the name after ``optax.``, in order.

    Raises:
      LookupError: a factory needs arguments that this script does not know, or is gone.
    """
    found = dict(vars(optax))
    found |= {f"contrib.{name}": value for name, value in vars(contrib).items()}
    names = [name for name, value in found.items() if _is_factory(name, value)]
    if gone := sorted(name for name in CALLS if name.partition(",")[0] not in found):
        raise LookupError(
            f"optax {optax.__version__} has no {', '.join(gone)}: remove them from "
            "CALLS in this script"
        )
    result = {
        name: _case_of(name, found[name.partition(",")[0]]) for name in {*names, *CALLS}
    }
    return dict(sorted(result.items(), key=lambda item: item[0].split(".")[::-1]))


def _is_factory(name: str, value: Any) -> bool:
    is_private = name.rpartition(".")[2].startswith("_")
    if is_private or inspect.isclass(value) or not callable(value):
        return False
    try:
        annotation = inspect.signature(value).return_annotation
    except ValueError:
        return False
    return "GradientTransformation" in str(annotation)


def _case_of(name: str, factory: Callable[..., Any]) -> Case:
    parameters = inspect.signature(factory).parameters
    first = next(iter(parameters), "")
    required = {n for n, p in parameters.items() if p.default is p.empty}
    has_rate = first == "learning_rate"
    if name not in CALLS and not required <= ({first} if has_rate else set()):
        raise LookupError(
            f"optax.{name}: new to this script, and it needs {', '.join(required)}; "
            "add it to CALLS"
        )
    call = CALLS.get(name, (0.1,) if has_rate else ())
    return Case(
        make=call if callable(call) else partial(factory, *call),
        extra_args=EXTRA_ARGS.get(name, lambda params: {}),
        descends=name in _DESCENDING or (has_rate and name != "scale_by_rprop"),
        params=_SHAPED.get(name, lambda params: params),
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
            extra_args = case.extra_args(params)
            program = trace_update(tx, params, extra_args, may_read="all")
            check_init(trace_init(tx, params))
            found = passes_for(program)
    except Exception:  # optax may raise anything; the refusal is among the remarks
        return REFUSED
    words = ["at once" if found.num_passes == 1 else f"{found.num_passes} passes"]
    own = {value for part in found.parts.values() for value in part.leaf_inputs}
    if own & {
        *found.prologue_state
    }:  # a pass reads stored state before the kernel does
        words.append("state twice")
    return ", ".join(words)


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
