"""The identity of a run in each commit, and the check before it is resumed.

Invariant: a resumed run continues at exactly the next batch of exactly the same data,
or is refused with a list of what differs.
"""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from jaxinf.command_line import UsageError
from jaxinf.errors import StoreMismatchError
from jaxinf.processes import Group
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch, Batches, batch_checksum
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.lora import ALPHA
from jaxinf.train.pretrained import architecture_of
from jaxinf.train.schedules import resolved_settings
from jaxinf.typing import JsonValue

_MADE_BY = "jaxinf.train"
_LOADER = "grain"

# Settings that decide batches, shapes or numbers: a run may not change them.
_FIXED = ("seed", "batch_size", "seq_len", "model", "preset", "dtype", "param_dtype")
_FIXED += ("task", "num_labels", "mask_rate", "optimizer", "compress", "freeze")
_FIXED += ("lora", "lora_alpha")
# Of runs that do not say it.
_BEFORE: Mapping[str, JsonValue] = {"freeze": [], "lora": None, "lora_alpha": ALPHA}
# Settings that a user may change in a run; a change is reported.
_FREE = ("learning_rate", "weight_decay", "schedule", "warmup_steps")
_FREE += ("clip_norm", "nonfinite", "optimizer_args")


def first_payload(config: TrainConfig) -> dict[str, JsonValue]:
    """Returns the payload of a new store's step 0: its model."""
    model = {"architecture": _architecture(config), "base": _base(config)}
    return {"made_by": _MADE_BY, "step": 0, **model}


def _base(config: TrainConfig) -> str | None:
    """Returns the checkpoint that the run began with, for exported adapters."""
    return None if config.source is None else str(config.source.expanduser().absolute())


def _architecture(config: TrainConfig) -> dict[str, JsonValue]:
    document = architecture_of(config.model_config, config.files)
    if config.lora is None:
        return document
    return {**document, "lora_alpha": config.lora_alpha}


class Identity:
    """A run's settings and data, as each commit keeps them."""

    def __init__(self, config: TrainConfig, data: TrainingData) -> None:
        self._where = config.store
        self._model_flag = "--model and --preset"
        if config.source or config.model_file:
            self._model_flag = "--from" if config.source else "--model-config"
        self._architecture, self._base = _architecture(config), _base(config)
        self._batch_size = config.batch_size
        settings = config.to_json() | resolved_settings(config)
        self._settings = {name: settings[name] for name in (*_FIXED, *_FREE, "steps")}
        self._data = data.identity
        self._version = importlib.metadata.version(_LOADER)

    def check_same(self, group: Group) -> None:
        """Refuses processes of one run that have other settings or data.

        Raises:
          UsageError: names flags, processes and values.
        """
        own: JsonValue = {"settings": self._settings, "data": self._data}
        found = group.gather("the settings of the run", lambda: own)
        for number, one in enumerate(found):
            pairs = [
                (name, value, found[0]["settings"][name])
                for name, value in one["settings"].items()
            ]
            pairs.append(("data", _describe(one["data"]), _describe(found[0]["data"])))
            differing = [
                f"--{name.replace('_', '-')}: expected the same in all processes, "
                f"found {value} in process {number}, and {other} in process 0"
                for name, value, other in pairs
                if value != other
            ]
            if differing:
                raise UsageError("; ".join(differing))

    def position(
        self, step: int, batch: Batch, shard: tuple[int, int]
    ) -> dict[str, JsonValue]:
        """Returns the payload of the commit of batch `step` (1 is the first)."""
        loader: dict[str, JsonValue] = {
            "name": _LOADER,
            "version": self._version,
            "state": Batches.position_of(step),
            "batch_crc32c": batch_checksum(batch),
            "shard": list(shard),
        }
        return {
            "made_by": _MADE_BY,
            "step": step,
            "architecture": self._architecture,
            "base": self._base,
            "examples": step * self._batch_size,
            "loader": loader,
            "data": self._data,
            "settings": self._settings,
        }

    def resume_step(self, payload: JsonValue, batches: Batches) -> int:
        """Returns the number of batches that the run of a commit has done.

        Args:
          batches: this command's batches; the last one of the run is compared.

        Raises:
          StoreMismatchError: settings or data differ; lists all differences.
        """
        held = _read(payload, self._where)
        self._check_loader(held)
        differences = [
            f"--{name.replace('_', '-')}: the run has {held['settings'].get(name)}, "
            f"this command {self._settings[name]}"
            for name in _FIXED
            if held["settings"].get(name) != self._settings[name]
        ]
        if not any(line.startswith(("--model:", "--preset:")) for line in differences):
            differences += self._other_fields(held.get("architecture"))
        if held["data"] != self._data:
            differences.append(
                f"--data: the run has {_describe(held['data'])}, this command "
                f"{_describe(self._data)}"
            )
        if differences:
            listed = "\n  ".join(differences)
            raise StoreMismatchError(
                f"{self._where}: the run in this store is at step {held['step']} and "
                f"cannot go on with other settings:\n  {listed}\nGive the run's own "
                "to go on with it, or another --store to begin a new run"
            )
        self._check_batch(held, batches)
        return held["step"]

    def _check_loader(self, held: Mapping[str, Any]) -> None:
        loader = held.get("loader")
        if isinstance(loader, Mapping) and loader.get("name") == _LOADER:
            return
        found = loader.get("name") if isinstance(loader, Mapping) else None
        raise StoreMismatchError(
            f"{self._where}: the run in this store is at step {held['step']} of "
            f"{found or 'a loader without a name'}, whose batches this version cannot "
            "go on with; finish the run with the version that began it, or give "
            "another --store"
        )

    def _check_batch(self, held: Mapping[str, Any], batches: Batches) -> None:
        """Checks that the loader makes the same batch from the same data."""
        step, loader = held["step"], held["loader"]
        # That part is compared which was kept: processes may be others now.
        number, count = loader.get("shard", batches.shard)
        if 0 <= number < count and self._batch_size % count == 0:
            part = batches.shared(step - 1, (number, count))
            if batch_checksum(part) == loader["batch_crc32c"]:
                return
        raise StoreMismatchError(
            f"{self._where}: expected the batch of step {step} to be the one that the "
            f"run saw, found another, of the same data: a package that makes batches "
            f"has changed. The run had grain {loader['version']}, here is "
            f"{self._version}; transformers, pillow and numpy may differ too. Install "
            "the run's own to go on with it"
        )

    def _other_fields(self, held: Any) -> list[str]:
        """Lists fields of the model that differ; older runs have none to compare.

        Two models with the same tree may compute differently.
        """
        if not isinstance(held, Mapping):
            return []
        theirs, ours = held["fields"], self._architecture["fields"]
        assert isinstance(ours, Mapping)
        return [
            f"{self._model_flag}: {name} of the run's model is {theirs.get(name)}, of "
            f"this command's {ours.get(name)}"
            for name in sorted({*theirs, *ours})
            if theirs.get(name) != ours.get(name)
        ]

    def changes(self, payload: JsonValue) -> list[str]:
        """Lists settings that differ from the run's and apply from here on."""
        held = _read(payload, self._where)["settings"]
        names: list[str] = list(_FREE)
        if self._settings["schedule"] != "constant":
            names.append("steps")  # the length of the decay
        return [
            f"{name} {held.get(name)} -> {self._settings[name]}"
            for name in names
            if held.get(name) != self._settings[name]
        ]


def _read(payload: JsonValue, where: object) -> dict[str, Any]:
    if isinstance(payload, Mapping) and payload.get("made_by") == _MADE_BY:
        held: dict[str, Any] = dict(payload)
        return held | {"settings": {**_BEFORE, **held["settings"]}}
    raise StoreMismatchError(
        f"{where}: expected a run of jaxinf.train, found a store whose last commit "
        "does not say where in the data it was (another program made it); go on with "
        "that program, or give another --store"
    )


def _describe(data: Mapping[str, Any]) -> str:
    train, validation = data["rows"]
    return (
        f"{train:,} rows and {validation:,} held out, with SHA-256 "
        f"{data['sha256'][:12]}… by {data.get('tokenizer') or 'images'}"
    )
