"""The configuration of a training run, which is also its command line.

Invariant: no combination of fields is ignored in silence: `jaxinf.train.checks` refuses
combinations without a meaning.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jaxinf_models import (
    MODELS,
    ModelConfig,
    ModelFamily,
    ModelFiles,
    TaskName,
    abstract_params,
    config_for,
    family_of,
)

from jaxinf.command_line import UsageError
from jaxinf.compress import TopK, parse_compression
from jaxinf.engine import DEFAULT_MEMORY_BYTES
from jaxinf.program import Average, parse_ema
from jaxinf.train.freezing import Frozen
from jaxinf.train.lora import ALPHA, Lora, parse_lora, with_new
from jaxinf.train.options import HELD_OUT_SHARE, Options
from jaxinf.typing import JsonValue, PyTree


def _parsed(flag: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"--{flag} {error}") from error


@dataclasses.dataclass(frozen=True)
class TrainConfig(Options):
    """Trains a model, with the optimizer's state on drives.

    Every step is committed to the store, which is the checkpoint: the same command
    resumes a run that was stopped, at exactly the next batch. The defaults train a
    small GPT-2 on bytes of text, in some two minutes on two CPU cores.
    """

    # What --from or --preset names, as `check` has read it. No flag.
    files: Annotated[ModelFiles | None, tyro.conf.Fixed, tyro.conf.Suppress] = None

    # The number of classes, by the data. No flag.
    num_labels: Annotated[int | None, tyro.conf.Fixed, tyro.conf.Suppress] = None

    @property
    def held_out_share(self) -> float | None:
        """The share of `data` to hold out; None if `validation` names files."""
        if not self.validation:
            return HELD_OUT_SHARE
        try:
            return float(*self.validation)
        except (TypeError, ValueError):
            return None

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, with the head for the task."""
        precise = dataclasses.replace(
            self._size, dtype=self.dtype, param_dtype=self.param_dtype
        )
        return config_for(precise, self.task_name, num_labels=self.num_labels)

    @property
    def _size(self) -> ModelConfig:
        """The model's configuration as its files or a preset have it."""
        if self.source is not None or self.model_file is not None:
            assert self.files is not None, "check reads them"
            return self.files.config
        return MODELS[self.model].presets[self.preset]

    @property
    def model_file(self) -> Path | None:
        """The config.json that `preset` names, or None."""
        return Path(self.preset) if self.preset.endswith(".json") else None

    @property
    def task_name(self) -> TaskName:
        """The given task, or the model's usual one."""
        return self.task or self.family.tasks[0]

    @property
    def family(self) -> ModelFamily:
        return family_of(self._size)

    @property
    def model_name(self) -> str:
        """The architecture and its size, for people."""
        place = self.source or self.model_file
        if place is None:
            return f"{self.model} {self.preset}"
        return f"{self.family.name} of {place}"

    @property
    def takes_images(self) -> bool:
        """Whether the model looks at images instead of tokens."""
        return hasattr(self.model_config, "image_size")

    @property
    def compression(self) -> TopK | None:
        """The compression that `compress` names; a UsageError if it does not parse."""
        return _parsed("compress", self.compress, parse_compression)

    @property
    def adapters(self) -> Lora | None:
        """The adapters that `lora` names; a UsageError if it does not parse."""
        return _parsed("lora", self.lora, parse_lora)

    @property
    def lora_alpha(self) -> float:
        return ALPHA if self.adapters is None else self.adapters.alpha

    @property
    def average(self) -> Average | None:
        """The average that `ema` names; a UsageError if it does not parse."""
        return _parsed(f"ema {self.ema}:", self.ema, parse_ema)

    @property
    def frozen(self) -> Frozen:
        """The leaves that stay as they are, by `freeze` or `lora`."""
        if self.adapters is None:
            return Frozen(self.freeze)
        has_classes = self.task_name == "classification"
        return self.adapters.frozen(trains_head=has_classes)

    @property
    def abstract(self) -> tuple[Any, PyTree]:
        """The model's graph, and shapes and dtypes of the run's params."""
        graphdef, params = abstract_params(self.model_config)
        if self.adapters is not None:
            params = jax.eval_shape(functools.partial(with_new, self.adapters), params)
        return graphdef, params

    @property
    def evaluates_average(self) -> bool:
        """Whether params are evaluated as their average, as schedule-free ones are."""
        return self.ema is not None or self.optimizer.startswith("schedule_free")

    @property
    def buffer_bytes(self) -> int:
        """Memory of the store's buffers in ``--mode update``."""
        return DEFAULT_MEMORY_BYTES if self.memory is None else self.memory

    @property
    def logs(self) -> Path:
        if self.log_dir is not None:
            return self.log_dir.expanduser().absolute()
        if self.store is None:
            return Path("runs/memory").absolute()
        store = self.store.expanduser().absolute()
        return store.with_name(store.name + "-log")

    def to_json(self) -> dict[str, JsonValue]:
        """All fields of the run as JSON, paths as text."""
        names = [field.name for field in dataclasses.fields(self)]
        document = {n: getattr(self, n) for n in names if n not in _NOT_OF_RUNS}
        return json.loads(json.dumps(document, default=str))


_NOT_OF_RUNS = ("files", "run_file", "trace")
