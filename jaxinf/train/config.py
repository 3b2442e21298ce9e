"""The configuration of a training run, which is also its command line.

Invariant: a field exists only if it works, and no combination of fields is ignored in
silence: `jaxinf.train.checks` refuses combinations without a meaning.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

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
from jaxinf.train.data.options import DataOptions, shown
from jaxinf.train.freezing import Frozen
from jaxinf.train.lora import ALPHA, Lora, parse_lora
from jaxinf.train.options import (
    ProcessOptions,
    RunOptions,
    StoreOptions,
    StreamOptions,
)
from jaxinf.typing import JsonValue, PyTree

ModelName: TypeAlias = Literal["gpt2", "bert", "t5", "vit", "bloom", "llama"]
DTypeName: TypeAlias = Literal["float32", "bfloat16"]
ScheduleName: TypeAlias = Literal["constant", "cosine", "linear", "wsd"]
EvalBatches: TypeAlias = int | Literal["all"] | None


def _parsed(flag: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"--{flag} {error}") from error


@dataclasses.dataclass(frozen=True)
class TrainConfig(ProcessOptions, StoreOptions, StreamOptions, DataOptions, RunOptions):
    """Trains a model, with the optimizer's state on drives.

    Every step is committed to the store, which is the checkpoint: the same command
    resumes a run that was stopped, at exactly the next batch. The defaults train a
    small GPT-2 on bytes of text, in some two minutes on two CPU cores.
    """

    # The comment above a field is its text in --help.

    # The architecture.
    model: ModelName = "gpt2"

    # The model's size, by the name of a preset of the architecture. For gpt2: nano has
    # 0.9 M params, small 124 M, medium 355 M, large 774 M and xl 1558 M.
    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"

    # A model of your own size, in place of --model and --preset: a file in the form of
    # Hugging Face's config.json (docs/models.md).
    model_file: Annotated[Path | None, shown("FILE", "none", name="model-config")] = (
        None
    )

    # Start from the weights in a Hugging Face checkpoint folder, in place of --model
    # and --preset. With --steps 0 they are imported, and nothing is trained.
    source: Annotated[Path | None, shown("DIR", "new weights", name="from")] = None

    # The task: predict the next token, masked tokens, an answer to a text, or a class.
    task: Annotated[
        TaskName | None,
        shown("{causal-lm,masked-lm,seq2seq,classification}", "the model's"),
    ] = None

    # Sequences or images in a step.
    batch_size: int = 8

    # Tokens in a sequence; without a --tokenizer a token is a byte.
    seq_len: Annotated[
        int | None,
        shown("INT", "64; with --from the longest example, at most 1024"),
    ] = None

    # The name of an optimizer of optax or optax.contrib that can run near storage
    # (docs/optimizers.md); --mode memory takes the others, too.
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw"

    # Arguments of that optimizer, such as weight_decay=0.01 b2=0.95 mu_dtype=bfloat16.
    # For adamw and lion weight_decay is 0.1, with --from 0.
    optimizer_args: Annotated[tuple[str, ...], shown("KEY=VALUE...", "optax's")] = ()

    # Peak learning rate. Required for optimizers other than adam and adamw.
    learning_rate: Annotated[
        float | None,
        shown(
            "RATE",
            "by size: 2e-3 nano, 6e-4 at 124 M, 2e-4 at 1.5 B params; with --from a "
            "tenth",
        ),
    ] = None

    # The learning rate after the warm-up: constant; falling as a cosine to a tenth at
    # --steps; falling linearly to 0 there; or wsd, falling so in the last fifth of
    # --steps alone. A constant run may be extended later, and end with wsd.
    schedule: ScheduleName = "constant"

    # Steps in which the learning rate rises linearly to its peak.
    warmup_steps: Annotated[int | None, shown("INT", "50; 30 with --from")] = None

    # Leaves of the model that stay as they are, and have no state: patterns of their
    # paths, such as wte or 'h[0-5]/*', where * stands for any text.
    freeze: Annotated[tuple[str, ...], shown("PATTERN...", "none")] = ()

    # Train adapters of this rank beside matrices (LoRA), and leave all else as it is,
    # but for a head of classes: 8 for those of attention, or with a pattern of the
    # matrices' paths, '8:h*/mlp/*'.
    lora: Annotated[str | None, shown("RANK[:PATTERN]", "none")] = None

    # Adapters are scaled by this over their rank.
    lora_alpha: float = ALPHA

    # Clip gradients to this global norm, for which updates wait; 0 is off.
    clip_norm: float = 1.0

    # Send only a part of each gradient to the drives: top_k:0.02 sends its largest
    # elements, in 2 % of the dense bytes. Options may follow, separated by commas:
    # warmup_steps=N, error_feedback=true, values=bfloat16 or float16, selection=exact.
    # docs/compression.md shows the cost in quality.
    compress: Annotated[str | None, shown("top_k:RATIO", "none")] = None

    # Keep a moving average of the params in the store, with this decay: 0.999, by which
    # the run is evaluated. Options may follow, separated by commas: start=N (the first
    # step), every=N (steps), debias=true, form=bf16 (2 bytes a param, rounded
    # stochastically). docs/integrations.md, "EMA of params", says how to read it.
    ema: Annotated[str | None, shown("DECAY", "none")] = None

    # Seed of the initial params, the batches and the sample.
    seed: int = 0

    # Dtype of activations and matrix products.
    dtype: DTypeName = "float32"

    # Dtype of the params on the JAX device. With bfloat16 the store has what is missing
    # to their float32 master; in --mode memory they have no master.
    param_dtype: DTypeName = "float32"

    # A gradient with NaN or Inf: end the run before that step, or skip the batch.
    nonfinite: Literal["error", "skip"] = "error"

    # Directory for metrics.jsonl (a line for each step), validation.jsonl, config.json,
    # config.toml.
    log_dir: Annotated[
        Path | None, shown("DIR", "STORE-log; runs/memory in --mode memory")
    ] = None

    # Steps between evaluations on the held-out data; 0 is at the end only. The step of
    # the lowest loss is kept as a checkpoint named best, one more copy of the state.
    eval_every: int = 0

    # Batches of the held-out data in an evaluation, always the same: a number, or all.
    eval_batches: Annotated[
        EvalBatches,
        shown("{INT,all}", "at most 64, fewer for a large model"),
    ] = None

    # Number of tokens to generate at the end; 0 is none.
    sample_bytes: Annotated[
        int | None, shown("INT", "200, fewer where that would take long")
    ] = None

    # What --from or --model-config names, as `check` has read it. No flag.
    files: Annotated[ModelFiles | None, tyro.conf.Fixed, tyro.conf.Suppress] = None

    # The number of classes, by the data. No flag.
    num_labels: Annotated[int | None, tyro.conf.Fixed, tyro.conf.Suppress] = None

    # The machine's file that `jaxinf plan` is given. No flag.
    machine: Annotated[Path | None, tyro.conf.Fixed, tyro.conf.Suppress] = None

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
            params = self.adapters.with_shapes(params)
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
        return {n: _plain(getattr(self, n)) for n in names if n not in _NOT_OF_RUNS}


_NOT_OF_RUNS = ("files", "run_file", "machine", "trace", "eval_only")


def _plain(value: object) -> JsonValue:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
