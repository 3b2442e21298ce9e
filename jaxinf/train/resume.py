"""What a commit says about the run it belongs to, and whether a run may go on from it.

Invariant: a resumed run continues at exactly the next batch of exactly the same data,
or is refused with a list of what differs.
"""

from collections.abc import Mapping
from typing import Any

from jaxinf.errors import StoreMismatchError
from jaxinf.train.config import TrainConfig
from jaxinf.train.data import ByteCorpus
from jaxinf.train.optimizers import peak_learning_rate
from jaxinf.typing import JsonValue

__all__ = ["Identity"]

_MADE_BY = "jaxinf.train"

# What decides the batches, the params' shapes and the numbers: never changed in a run.
_FIXED = ("seed", "batch_size", "seq_len", "model", "preset", "dtype", "param_dtype")
_FIXED += ("optimizer", "compress")
# What a user may well change on the way; said, not refused.
_FREE = ("learning_rate", "weight_decay", "momentum", "schedule", "warmup_steps")
_FREE += ("clip_norm", "nonfinite", "optimizer_args")


class Identity:
    """A run's settings and data, as they are kept in each commit."""

    def __init__(self, config: TrainConfig, corpus: ByteCorpus) -> None:
        self._where = config.store
        self._tokens_a_step = config.batch_size * config.seq_len
        settings = config.to_json()
        settings["learning_rate"] = peak_learning_rate(config)
        self._settings = {name: settings[name] for name in (*_FIXED, *_FREE, "steps")}
        self._data: dict[str, JsonValue] = {
            "train_bytes": corpus.train.size,
            "validation_bytes": corpus.validation.size,
            "sha256": corpus.fingerprint(),
        }

    def position(self, step: int) -> dict[str, JsonValue]:
        """The payload of the commit made with batch `step` (1 is the first)."""
        return {
            "made_by": _MADE_BY,
            "step": step,
            "tokens": step * self._tokens_a_step,
            "data": self._data,
            "settings": self._settings,
        }

    def resume_step(self, payload: JsonValue) -> int:
        """Batches done so far in the run of a commit.

        Raises:
          StoreMismatchError: the run has other settings or data; lists them all.
        """
        held = _read(payload, self._where)
        differences = [
            f"--{name.replace('_', '-')}: the run has {held['settings'].get(name)}, "
            f"this command {self._settings[name]}"
            for name in _FIXED
            if held["settings"].get(name) != self._settings[name]
        ]
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
        return held["step"]

    def changes(self, payload: JsonValue) -> list[str]:
        """Settings that differ from the run's and take effect from here on."""
        held = _read(payload, self._where)["settings"]
        names: list[str] = list(_FREE)
        if self._settings["schedule"] == "cosine":
            names.append("steps")  # the length of the decay
        return [
            f"{name} {held.get(name)} -> {self._settings[name]}"
            for name in names
            if held.get(name) != self._settings[name]
        ]


def _read(payload: JsonValue, where: object) -> dict[str, Any]:
    if isinstance(payload, Mapping) and payload.get("made_by") == _MADE_BY:
        return dict(payload)
    raise StoreMismatchError(
        f"{where}: expected a run of jaxinf.train, found a store whose last commit "
        "does not say where in the data it was (another program made it); go on with "
        "that program, or give another --store"
    )


def _describe(data: Mapping[str, Any]) -> str:
    num_bytes = data["train_bytes"] + data["validation_bytes"]
    return f"{num_bytes:,} bytes with SHA-256 {data['sha256'][:12]}…"
