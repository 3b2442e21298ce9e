"""The description of a run in each commit, and its check when the run is resumed.

Invariant: a resumed run continues at exactly the next batch of exactly the same data,
or is refused with a list of what differs.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from jaxinf_models import config_to_json, family_of

from jaxinf.errors import StoreMismatchError
from jaxinf.processes import Group
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.optimizers import resolve_settings
from jaxinf.typing import JsonValue

_MADE_BY = "jaxinf.train"
_LOADER = {"name": "grain", "version": version("grain")}

# Settings that decide batches, shapes or numbers: a run may not change them.
_FIXED = ("seed", "batch_size", "seq_len", "model", "preset", "dtype", "param_dtype")
_FIXED += ("task", "num_labels", "optimizer", "compress", "freeze", "lora")
# Settings that a user may change in a run; a change is reported.
_FREE = ("learning_rate", "weight_decay", "schedule", "warmup_steps")
_FREE += ("clip_norm", "nonfinite", "optimizer_args", "ema", "micro_batches")


def initial_payload(config: TrainConfig) -> dict[str, JsonValue]:
    """Returns the payload of a new store's step 0: the model, as an export needs it."""
    model = config.model_config
    family = family_of(model)
    architecture: dict[str, JsonValue] = {
        "model": family.name,
        "task": getattr(model, "head", family.tasks[0]),
        "fields": config_to_json(model),
    }
    if config.files is not None and config.files.checkpoint is not None:
        found = config.files.checkpoint.architecture
        architecture |= {"model_type": found.model_type, "extra": dict(found.extra)}
    if config.lora is not None:
        architecture["lora_alpha"] = config.lora_alpha
    payload = {"made_by": _MADE_BY, "step": 0, "architecture": architecture}
    return payload | {"weights": config.files and config.files.weights_sha256()}


def run_identity(config: TrainConfig, data: TrainingData) -> dict[str, Any]:
    """Returns the part that the payloads of all steps after the first share."""
    settings = config.to_json() | resolve_settings(config)
    if config.model_file is not None:  # may move; its fields count
        settings["preset"] = TrainConfig.preset
    names = (*_FIXED, *_FREE, "steps")
    recorded = {name: settings[name] for name in names}
    return initial_payload(config) | {"data": data.identity, "settings": recorded}


def step_payload(identity: Mapping[str, Any], step: int) -> dict[str, JsonValue]:
    """Returns the payload of the commit of batch `step` (1 is the first)."""
    loader: dict[str, JsonValue] = {**_LOADER, "state": {"next_index": step}}
    examples = step * identity["settings"]["batch_size"]
    return {**identity, "step": step, "examples": examples, "loader": loader}


def check_processes_agree(identity: Mapping[str, Any], group: Group) -> None:
    """Refuses processes of one run that have other settings or data."""
    settings = {**identity["settings"], "data": _describe_data(identity["data"])}
    remedy = "give all of them the same flags and the same data"
    group.agree("the settings of the run", lambda: settings, remedy)


def check_weights(place: Any, identity: dict[str, Any], payload: JsonValue) -> None:
    """Refuses other weights than a run began with, if its (newer) commits name them."""
    if not isinstance(payload, Mapping) or "weights" not in payload:
        del identity["weights"]
    elif identity["weights"] != payload["weights"]:
        raise StoreMismatchError(
            f"{place}: the run in this store began with other weights than this "
            "command; give the --from that it began with, or a copy, or another --store"
        )


def check_resumable(
    config: TrainConfig, identity: Mapping[str, Any], payload: JsonValue
) -> tuple[int, list[str]]:
    """Checks that a command may go on with a commit's run, or raises all differences.

    Returns the number of batches that the run has done, and the settings that change.
    """
    commit: Mapping[str, Any] = payload if isinstance(payload, Mapping) else {}
    committed, settings = commit.get("settings"), identity["settings"]
    if commit.get("made_by") != _MADE_BY or not isinstance(committed, Mapping):
        raise StoreMismatchError(
            f"{config.store}: expected a run of jaxinf.train, found a store whose last "
            "commit does not say where in the data it was (another program made it); "
            "go on with that program, or give another --store"
        )
    step = commit["step"]
    differences = [
        f"{_flag(name)}: the run has {committed.get(name)}, this command "
        f"{settings[name]}"
        for name in _FIXED
        if committed.get(name) != settings[name]
    ]
    if not any(x.startswith(("--model:", "--preset:", "--task:")) for x in differences):
        differences += _architecture_differences(
            commit.get("architecture"), identity["architecture"]
        )
    if commit["data"] != identity["data"]:
        differences.append(
            f"--data: the run has {_describe_data(commit['data'])}, this command "
            f"{_describe_data(identity['data'])}"
        )
    if differences:
        listed = "\n  ".join(differences)
        raise StoreMismatchError(
            f"{config.store}: the run in this store is at step {step} and cannot go on "
            f"with other settings:\n  {listed}\nGive the run's own to go on with it, "
            "as --config with the config.toml of its logs does, or another --store to "
            "begin a new run"
        )
    # A decay has the length of the run.
    names = _FREE if settings["schedule"] == "constant" else (*_FREE, "steps")
    pairs = {n: (committed[n], settings[n]) for n in names if n in committed}
    loader = commit.get("loader")
    if isinstance(loader, Mapping):
        pairs["grain"] = loader.get("version"), _LOADER["version"]
    return step, [f"{name} {a} -> {b}" for name, (a, b) in pairs.items() if a != b]


def _architecture_differences(
    committed: JsonValue, architecture: Mapping[str, Any]
) -> list[str]:
    """Lists differing fields of a run's model, which its params may not show."""
    if not isinstance(committed, Mapping):
        return []
    theirs, ours = (
        {**x, **fields} if isinstance(fields := x.get("fields"), Mapping) else x
        for x in (committed, architecture)
    )
    return [
        f"{name} of the run's model is {theirs.get(name)}, of this command's "
        f"{ours.get(name)}"
        for name in sorted({*theirs, *ours} - {"fields", "model_type", "extra"})
        if theirs.get(name) != ours.get(name)
    ]


def _describe_data(data: Mapping[str, Any]) -> str:
    train, validation = data["rows"]
    return (
        f"{train:,} rows and {validation:,} held out, with SHA-256 "
        f"{data['sha256'][:12]}… by {data.get('tokenizer') or 'images'}"
    )


def _flag(name: str) -> str:
    flags = {"num_labels": "--data, classes", "weight_decay": "--optimizer-args"}
    return flags.get(name, f"--{name.replace('_', '-')}")
