"""Finds the optimizers of optax that can run near storage, and their promises.

    python scripts/classify_optimizers.py            # compares docs/optimizers.md
    python scripts/classify_optimizers.py --write    # writes its tables

Every public factory of `optax` and `optax.contrib` is found, called and traced. The
script fails if it does not know a factory, so that none is missing from the tables.
"""

import argparse
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import Passes, trace_init, trace_update
from jaxinf.streaming import check_init, passes_for, trace_optimizer
from jaxinf.train.optimizers import optax_optimizers

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
BITS = ("adagrad", "adam", "adamw", "lion", "sgd")
"""Optimizers with the bits of jitted optax; tests/kernels/test_bits.py checks them."""

EXACT, NEAR, REFUSED = "bits", "tolerance", "refused"

PARAMS = {
    "bias": jax.ShapeDtypeStruct((3072,), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((50304, 768), jnp.float32),
}
"""Params of a real model's size, so that state that grows with rows is realistic."""


@dataclass(frozen=True)
class Case:
    """Instructions to make and call one transformation.

    Attributes:
      make: Makes the transformation.
      extra_args: Makes the arguments of its update from the params (or their avals).
      descends: Whether its updates descend; others are put before sgd.
      params: Converts the params to the tree that it takes.
      about: Its remark in the table.
    """

    make: Callable[[], Any]
    extra_args: Callable[[Any], Mapping[str, Any]] = lambda params: {}
    descends: bool = False
    params: Callable[[Any], Any] = lambda params: params
    about: str = ""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    label: str
    guarantee: str
    state_bytes: int | None = None
    slots: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=list)
    streamed: str = REFUSED


# --- Factories ----------------------------------------------------------------------

_UNANNOTATED_FACTORIES = frozenset(
    """
    MultiSteps monitor scale_by_factored_rms dog dowg hutchinson_estimator_diag_hessian
    """.split()
)
_OTHERS = frozenset(
    """
    bias_correction matrix_inverse_pth_root schedule_free_eval_params
    sigmoid_binary_cross_entropy update_infinity_moment update_moment
    update_moment_per_elem_norm GradientTransformation GradientTransformationExtraArgs
    WrappedSchedule
    """.split()
)
"""Callables that are not factories, but look so or have no return annotation."""


def factories() -> dict[str, Callable[..., Any]]:
    """Returns every factory by the name after ``optax.``.

    Raises:
      LookupError: this script cannot tell whether a public callable is a factory.
    """
    found, unknown = {}, []
    for prefix, namespace in (("", optax), ("contrib.", optax.contrib)):
        for name, value in sorted(vars(namespace).items()):
            verdict = _is_factory(name, value)
            if verdict is None:
                unknown.append(prefix + name)
            elif verdict:
                found[prefix + name] = value
    if unknown:
        raise LookupError(
            f"optax {optax.__version__} has {', '.join(unknown)}: add them to "
            "_UNANNOTATED_FACTORIES or to _OTHERS in this script"
        )
    return found


def _is_factory(name: str, value: Any) -> bool | None:
    """Returns None if the script cannot tell."""
    if name.startswith("_") or not callable(value) or name in _OTHERS:
        return False
    if name in _UNANNOTATED_FACTORIES:
        return True
    if inspect.isclass(value):
        return None if {"init", "update"} <= set(dir(value)) else False
    if not inspect.isroutine(value) and not hasattr(value, "func"):
        return None if type(value).__name__ == "PjitFunction" else False
    annotation = inspect.signature(value).return_annotation
    if annotation is inspect.Signature.empty:
        return None
    return "GradientTransformation" in str(annotation)


# --- Cases --------------------------------------------------------------------------


def _value_fn(params: Any, *_: Any, **__: Any) -> jax.Array:
    return sum((jnp.sum(x * x) / 2 for x in jax.tree.leaves(params)), jnp.float32(0))


def _value(params: Any) -> dict[str, Any]:
    del params
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
_INSIDE = "around scale_by_adam"

CASES = {
    "MultiSteps": Case(lambda: optax.MultiSteps(_ADAM(), 2), about=_INSIDE),
    "adaptive_grad_clip": Case(lambda: optax.adaptive_grad_clip(0.1)),
    "add_noise": Case(lambda: optax.add_noise(0.01, 0.5, jax.random.key(0))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(_ADAM(), 3), about=_INSIDE),
    "chain": Case(lambda: optax.chain(_ADAM()), about=_INSIDE),
    "clip": Case(lambda: optax.clip(0.5)),
    "clip_by_block_rms": Case(lambda: optax.clip_by_block_rms(0.5)),
    "clip_by_global_norm": Case(lambda: optax.clip_by_global_norm(0.5)),
    "conditionally_mask": Case(
        lambda: optax.conditionally_mask(_ADAM(), _every_second), about=_INSIDE
    ),
    "conditionally_transform": Case(
        lambda: optax.conditionally_transform(_ADAM(), _every_second), about=_INSIDE
    ),
    "ema": Case(lambda: optax.ema(0.9)),
    "flatten": Case(lambda: optax.flatten(_ADAM()), about=_INSIDE),
    "freeze": Case(lambda: optax.freeze(_BIASES)),
    "inject_hyperparams": Case(
        lambda: optax.inject_hyperparams(_ADAM)(b1=0.8), about=_INSIDE
    ),
    "inject_stateful_hyperparams": Case(
        lambda: optax.inject_stateful_hyperparams(_ADAM)(b1=0.8), about=_INSIDE
    ),
    "lbfgs": Case(optax.lbfgs, _line_search, descends=True),
    "lookahead": Case(
        lambda: optax.lookahead(optax.adam(0.1), 2, 0.5),
        descends=True,
        params=lambda params: optax.LookaheadParams(params, params),
        about="around adam",
    ),
    "masked": Case(lambda: optax.masked(_ADAM(), _KERNELS), about=_INSIDE),
    "measure_with_ema": Case(lambda: optax.measure_with_ema(_norms, 0.9)),
    "monitor": Case(lambda: optax.monitor({"norm": optax.tree.norm})),
    "multi_transform": Case(
        lambda: optax.multi_transform(
            {True: _ADAM(), False: optax.identity()}, _KERNELS
        ),
        about=_INSIDE,
    ),
    "named_chain": Case(lambda: optax.named_chain(("adam", _ADAM())), about=_INSIDE),
    "noisy_sgd": Case(
        lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)), descends=True
    ),
    "partition": Case(
        lambda: optax.partition({True: _ADAM(), False: optax.identity()}, _KERNELS),
        about=_INSIDE,
    ),
    "polyak_sgd": Case(optax.polyak_sgd, _value, descends=True),
    "scale": Case(lambda: optax.scale(0.5)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.scale_by_backtracking_linesearch(3), _line_search
    ),
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
        lambda: optax.selective_transform(_ADAM(), freeze_mask=_BIASES), about=_INSIDE
    ),
    "snapshot": Case(lambda: optax.snapshot("norm", optax.tree.norm)),
    "stateless": Case(
        lambda: optax.stateless(lambda u, p: jax.tree.map(lambda x: x / 2, u))
    ),
    "stateless_with_tree_map": Case(lambda: optax.stateless_with_tree_map(_decayed)),
    "trace": Case(lambda: optax.trace(0.9)),
    "with_extra_args_support": Case(
        lambda: optax.with_extra_args_support(_ADAM()), about=_INSIDE
    ),
    "contrib.differentially_private_aggregate": Case(
        lambda: _CONTRIB.differentially_private_aggregate(1.0, 0.1, jax.random.key(0))
    ),
    "contrib.dpsgd": Case(lambda: _CONTRIB.dpsgd(0.1, 1.0, 0.1, 0), descends=True),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        _CONTRIB.hutchinson_estimator_diag_hessian, lambda _: {"obj_fn": _value_fn}
    ),
    "contrib.mechanize": Case(
        lambda: _CONTRIB.mechanize(optax.sgd(0.1)), descends=True, about="around sgd"
    ),
    "contrib.momo": Case(_CONTRIB.momo, _value, descends=True),
    "contrib.momo_adam": Case(_CONTRIB.momo_adam, _value, descends=True),
    "contrib.reduce_on_plateau": Case(_CONTRIB.reduce_on_plateau, _value),
    "contrib.sam": Case(
        lambda: _CONTRIB.sam(
            optax.sgd(0.1), optax.chain(_CONTRIB.normalize(), optax.sgd(0.05))
        ),
        descends=True,
        about="around sgd",
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
        lambda: _CONTRIB.schedule_free(optax.sgd(0.1), 0.1),
        descends=True,
        about="around sgd",
    ),
    "contrib.simplified_ademamix": Case(
        lambda: _CONTRIB.simplified_ademamix(0.01), descends=True
    ),
    "contrib.sophia": Case(
        lambda: _CONTRIB.sophia(0.1), lambda _: {"obj_fn": _value_fn}, descends=True
    ),
    "contrib.split_real_and_imaginary": Case(
        lambda: _CONTRIB.split_real_and_imaginary(_ADAM()), about=_INSIDE
    ),
}
"""Factories that need more than a learning rate."""

_SGD = {"momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}


def cases() -> dict[str, Case]:
    """Returns a case for every factory, in the tables' order.

    Raises:
      LookupError: a factory needs arguments that this script does not know, or is gone.
    """
    found = factories()
    result = {name: _case_of(name, factory) for name, factory in found.items()}
    gone = sorted(CASES.keys() - found)
    if gone:
        raise LookupError(
            f"optax {optax.__version__} has no {', '.join(gone)}: remove them from "
            "CASES in this script"
        )
    for about, options in _SGD.items():
        result[f"sgd, {about}"] = Case(
            lambda options=options: optax.sgd(0.1, **options), descends=True
        )
    return dict(sorted(result.items(), key=lambda item: item[0].split(".")[::-1]))


def _case_of(name: str, factory: Callable[..., Any]) -> Case:
    if name in CASES:
        return CASES[name]
    parameters = list(inspect.signature(factory).parameters.values())
    required = [p.name for p in parameters if p.default is p.empty]
    if parameters and parameters[0].name == "learning_rate":
        if set(required) <= {"learning_rate"}:
            return Case(lambda: factory(0.1), descends=True)
    elif not required:
        return Case(factory)
    raise LookupError(
        f"optax.{name}: new to this script, and it needs {', '.join(required)}; add "
        "it to CASES"
    )


# --- Classification -----------------------------------------------------------------


def classify(name: str, case: Case) -> Row:
    """Traces one transformation and classifies the result."""
    params = case.params(PARAMS)
    streamed = passes(case)
    function, comma, form = name.partition(",")
    label = f"`{function}`{comma}{form}"
    notes = [case.about] if case.about else []
    try:
        with warnings.catch_warnings(action="ignore"):  # optax's deprecations
            tx = case.make()
            program = trace_update(tx, params, case.extra_args(params))
            trace_init(tx, params)
    except UnsupportedTransformError as error:
        notes.append(_gist(str(error)))
        return Row(name, label, REFUSED, notes=notes, streamed=streamed)
    except Exception as error:  # optax may raise anything
        reason = str(error).splitlines()[0]
        return Row(name, label, REFUSED, notes=[*notes, f"optax: {reason}"])
    leaf = program.leaves[-1]
    if leaf.kernel.num_arrays:
        notes.append(
            f"arrays of the leaf's shape that the JAX device computes: "
            f"{leaf.kernel.num_arrays}"
        )
    if needed := sorted(case.extra_args(params)):
        notes.append(f"needs {', '.join(f'`{name}`' for name in needed)}")
    return Row(
        name,
        label,
        EXACT if name.split(",")[0] in BITS else NEAR,
        sum(slot.dtype.itemsize for slot in leaf.slots),
        [f"`{slot.name}`" for slot in leaf.slots],
        notes,
        streamed,
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
    return any(
        value in found.recalled
        for number in range(found.num_passes)
        for leaf in range(len(found.gradients))
        if (part := found.part(number, leaf)) is not None
        for value in part.own
    )


def _gist(message: str) -> str:
    """Shortens the message of an `UnsupportedTransformError`."""
    where = message.split(": ")[0].removeprefix("optimizer ")
    primitive = re.search(
        r"found the primitive (\w+)(?: \(from (\S+) in [^,)]+(?:, for (\w+))?\))?",
        message,
    )
    if primitive:
        name, function, transform = primitive.groups()
        origin = transform or (function or "").split(".")[0]
        found = f"`{name}` over what is stored" + (f", in {origin}" if origin else "")
        is_state = where.startswith("state")
        return f"{found}, for `{where}`" if is_state else found
    if "of the shape of its params leaf" in message:
        path = where.removeprefix("state").split("['")[0]
        return f"`{path}` is not of the params' shapes, and too large for JAX"
    if "structure that tx.init gives" in message:
        return "its state changes its structure in the first update"
    return message.split("; ")[0]


# --- The page -----------------------------------------------------------------------

_BEGIN, _END = "<!-- {} begins: written by {} -->", "<!-- {} ends -->"
_SCRIPT = "scripts/classify_optimizers.py"


def tables() -> dict[str, str]:
    """Returns the generated parts of the page by name."""
    rows = [classify(name, case) for name, case in cases().items()]
    optimizers = optax_optimizers()
    is_optimizer = [
        row.name.split(",")[0].removeprefix("contrib.") in optimizers for row in rows
    ]
    chosen = [row for row, flag in zip(rows, is_optimizer, strict=True) if flag]
    others = [row for row, flag in zip(rows, is_optimizer, strict=True) if not flag]
    return {
        "summary": _summary(chosen, others),
        "optimizers": _table("optimizer", chosen),
        "transformations": _table("transformation", others),
    }


def _summary(optimizers: Sequence[Row], others: Sequence[Row]) -> str:
    lines = [
        f"optax {optax.__version__}, forms of sgd counted apart:",
        "",
        "| | bits | tolerance | refused | all |",
        "|---|---|---|---|---|",
    ]
    for name, rows in (("optimizers", optimizers), ("transformations", others)):
        counts = [
            sum(r.guarantee == kind for r in rows) for kind in (EXACT, NEAR, REFUSED)
        ]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {len(rows)} |")
    return "\n".join(lines)


def _table(title: str, rows: Sequence[Row]) -> str:
    order = (EXACT, NEAR, REFUSED)
    lines = [
        f"| {title} | near storage | streamed | state, bytes a param | stored | "
        "remarks |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: order.index(row.guarantee)):
        size = "" if row.state_bytes is None else str(row.state_bytes)
        slots = ", ".join(row.slots)
        cells = (row.label, row.guarantee, row.streamed, size, slots)
        lines.append(f"| {' | '.join(cells)} | {'; '.join(row.notes)} |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    """Returns the page with its generated parts renewed."""
    for name, text in tables().items():
        begin, end = _BEGIN.format(name, _SCRIPT), _END.format(name)
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise LookupError(f"{PAGE}: expected the lines {begin!r} and {end!r}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main(*, write: bool) -> int:
    """Writes or compares the page; returns the exit status."""
    page = PAGE.read_text()
    new = rendered(page)
    if write:
        PAGE.write_text(new)
    elif new != page:
        print(f"{PAGE} is not up to date; run python {_SCRIPT} --write")
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables")
    sys.exit(main(write=parser.parse_args().write))
