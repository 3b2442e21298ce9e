"""The configuration of a training run, which is also its command line.

Invariant: a field exists only if it works, and the comment above it is its text in
``--help``. No combination of fields is ignored in silence: `jaxinf.train.checks`
refuses those without a meaning.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

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

from jaxinf.command_line import ByteSize, UsageError
from jaxinf.compress import TopK, parse_compression
from jaxinf.engine import DEFAULT_MEMORY_BYTES, Durability
from jaxinf.program import Average, parse_ema
from jaxinf.store import StateFormat
from jaxinf.streaming import Policy
from jaxinf.terminal import parse_bytes
from jaxinf.train.freezing import FrozenLeaves
from jaxinf.train.lora import DEFAULT_ALPHA, Lora, add_adapters, parse_lora
from jaxinf.typing import JsonValue, PyTree

HELD_OUT_SHARE = 0.05

ModelName: TypeAlias = Literal["gpt2", "bert", "t5", "vit", "bloom", "llama"]
DTypeName: TypeAlias = Literal["float32", "bfloat16"]
ScheduleName: TypeAlias = Literal["constant", "cosine", "linear", "wsd"]


def _flag(metavar: str, default: str, *, name: str | None = None) -> Any:
    """Sets texts that `--help` shows, and a flag's name if it is not the field's."""
    hint = f"(default: {default})"
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint=hint)


_MEMORY: Any = dataclasses.replace(
    ByteSize,
    instance_from_str=lambda words: (
        None if words[0].lower() == "none" else parse_bytes(words[0])
    ),
)
_LAUNCH: Any = tyro.constructors.PrimitiveConstructorSpec(
    nargs=(0, 1),
    metavar="[HOST:PORT,N,I]",
    instance_from_str=lambda words: (
        None if words[:1] == ["None"] else "".join(words[:1])
    ),
    is_instance=lambda value: True,
    str_from_instance=lambda value: [value or ""],
)


def _parse_flag(flag: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"--{flag} {error}") from error


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Trains a model, with the optimizer's state on drives.

    Every step is committed to the store, which is the checkpoint: the same command
    resumes a run that was stopped, at exactly the next batch. The defaults train a
    small GPT-2 on bytes of text, in some two minutes on two CPU cores.
    """

    # --- run --------------------------------------------------------------------------

    # A file in TOML with flags of the run, without --: batch-size = 16. Flags win.
    run_file: Annotated[Path | None, _flag("FILE", "none", name="config")] = None

    # Directory of the store: a new one, or the store of a run to resume.
    store: Annotated[Path | None, _flag("DIR", "none; update, stream need it")] = None

    # Train up to this number of batches in all, including those of earlier runs.
    steps: int = 1000

    # Seed of the initial params and the batches.
    seed: int = 0

    # update: the optimizer's state is in the store and is updated beside the drive.
    # stream: params are in the store, too, and pass through --memory bytes. memory:
    # plain optax with all state in memory, the baseline; nothing is kept.
    mode: Literal["update", "stream", "memory"] = "update"

    # A gradient with NaN or Inf: end the run before that step, or skip the batch.
    nonfinite: Literal["error", "skip"] = "error"

    # Dtype of activations and matrix products.
    dtype: DTypeName = "float32"

    # --- data -------------------------------------------------------------------------

    # The training data: text files, JSON lines, Parquet, folders of these, quoted
    # globs; images in a folder for each class. docs/training.md describes each.
    data: Annotated[tuple[str, ...], _flag("PATH...", "Python's own sources")] = ()

    # The validation data, or the share of --data to hold out: 0.1.
    validation: Annotated[
        tuple[str, ...], _flag("PATH...|SHARE", "0.05 of --data")
    ] = ()

    # A Hugging Face folder with a tokenizer; without it every byte is a token.
    tokenizer: Annotated[Path | None, _flag("DIR", "bytes")] = None

    # With prompts and responses, or messages: learn the answers alone, or all text.
    loss_on: Literal["answers", "all"] = "answers"

    # Sequences or images in a step.
    batch_size: int = 8

    # Tokens in a sequence; without a --tokenizer a token is a byte.
    seq_len: Annotated[
        int | None,
        _flag("INT", "64; with --from the longest example, at most 1024"),
    ] = None

    # --- model ------------------------------------------------------------------------

    # The architecture.
    model: ModelName = "gpt2"

    # The model's size: a preset of the architecture, or in place of --model a file in
    # the form of Hugging Face's config.json (docs/models.md). For gpt2: nano has 0.9 M
    # params, small 124 M, medium 355 M, large 774 M and xl 1558 M.
    preset: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "nano"

    # A Hugging Face folder whose weights to start from; leave --model and --preset out.
    # With --steps 0 the store has them, and nothing is trained.
    source: Annotated[Path | None, _flag("DIR", "new weights", name="from")] = None

    # The task: predict the next token, masked tokens, an answer to a text, or a class.
    task: Annotated[
        TaskName | None,
        _flag("{causal-lm,masked-lm,seq2seq,classification}", "the model's"),
    ] = None

    # Leaves of the model that stay as they are, and have no state: patterns of their
    # paths, such as wte or 'h[0-5]/*', where * stands for any text.
    freeze: Annotated[tuple[str, ...], _flag("PATTERN...", "none")] = ()

    # Train adapters of this rank beside matrices (LoRA), and leave all else as it is,
    # but for a head of classes: 8 for those of attention, or with a pattern of the
    # matrices' paths, '8:h*/mlp/*'. They are scaled by 16 over the rank, or by another
    # number: 8,alpha=32.
    lora: Annotated[str | None, _flag("RANK[:PATTERN][,alpha=A]", "none")] = None

    # Dtype of the params on the JAX device. With bfloat16 the store has what is missing
    # to their float32 master; in --mode memory they have no master.
    param_dtype: DTypeName = "float32"

    # --- optimizer --------------------------------------------------------------------

    # The name of an optimizer of optax or optax.contrib that can run near storage: see
    # docs/optimizers.md. In --mode memory the others, too.
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw"

    # Arguments of that optimizer, such as weight_decay=0.01 b2=0.95 mu_dtype=bfloat16.
    # For adamw and lion weight_decay is 0.1, with --from 0.
    optimizer_args: Annotated[tuple[str, ...], _flag("KEY=VALUE...", "optax's")] = ()

    # Peak learning rate. Required for optimizers other than adam and adamw.
    learning_rate: Annotated[
        float | None,
        _flag("RATE", "by size: 2e-3 nano, 2e-4 at 1.5 B params; with --from a tenth"),
    ] = None

    # The learning rate after the warm-up: constant; cosine, which falls to a tenth at
    # the last step; linear, to 0 there; or wsd, which falls so in the last fifth of the
    # steps alone. A constant run may be extended later, and end with wsd.
    schedule: ScheduleName = "constant"

    # Steps in which the learning rate rises linearly to its peak.
    warmup_steps: Annotated[int | None, _flag("INT", "50; 30 with --from")] = None

    # Clip gradients to this global norm, for which updates wait; 0 is off.
    clip_norm: float = 1.0

    # Send only the largest elements of each gradient to the drives: top_k:0.02 in 2 %
    # of the dense bytes. Options may follow, each after a comma: warmup_steps=N,
    # error_feedback=true, values=bfloat16 or float16. docs/compression.md has the cost.
    compress: Annotated[str | None, _flag("top_k:RATIO", "none")] = None

    # Keep a moving average of the params in the store, with this decay: 0.999, by which
    # the run is evaluated. Options may follow, each after a comma: every=N (steps),
    # debias=true, form=bf16 (2 bytes a param). docs/integrations.md: how to read it.
    ema: Annotated[str | None, _flag("DECAY", "none")] = None

    # --- memory and drives ------------------------------------------------------------

    # Host memory, such as 4GiB. In --mode update: of the buffers through which state
    # passes, with cards of each card. In --mode stream: of all but the process itself.
    memory: Annotated[
        int | None, _MEMORY, _flag("BYTES", "512MiB; --mode stream needs it")
    ] = None

    # For --mode stream: memory of the JAX device for params, activations and
    # temporaries; on a CPU the part of --memory for them.
    device_memory: Annotated[int | None, _MEMORY, _flag("BYTES", "what is free")] = None

    # A mounted drive to spread a new store's chunks over; repeat it for more drives.
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]], _flag("DIR", "the store itself")
    ] = ()

    # The processor that updates the chunks: host, the CPU; smartssd, the card beside
    # the drive; emulated, an emulated card; with options (docs/cards.md).
    csd: Annotated[str, _flag("host|smartssd|emulated", "host")] = "host"

    # Format of the optimizer's float32 state in a new store: fp32, bfloat16 with
    # stochastic rounding, or 8 bits with a scale for each 256 elements.
    state: Annotated[
        StateFormat | None, _flag("{fp32,bf16,int8}", "fp32, or what the store has")
    ] = None

    # Activations are computed again for the backward pass (recompute), or stay in
    # memory (keep). For --mode stream, offload: what --memory has no room for is on the
    # drive meanwhile; plan: so, but what the drive is too slow for is recomputed.
    policy: Annotated[
        Policy | None,
        _flag("{recompute,keep,offload,plan}", "keep; recompute in --mode stream"),
    ] = None

    # Gradient accumulation: parts of a batch that run one after another, so that
    # activations take the memory of a part; each learned token counts alike.
    micro_batches: int = 1

    # For --mode stream: the JAX device computes the updates of every so many parts of
    # the optimizer's state, and the host the others; 0: the host all. auto: as many as
    # save time in the first steps of a run, or none (docs/streaming.md).
    device_updates: Annotated[
        int | Literal["auto"] | None,
        _flag("{INT,auto}", "as in the store's last step, or 0"),
    ] = None

    # --- commits and checkpoints ------------------------------------------------------

    # Steps to commit: every step (step), every n-th one (a number), or checkpoints
    # alone (checkpoint). A crash loses the steps since the last commit.
    durability: Annotated[Durability, _flag("{step,INT,checkpoint}", "step")] = "step"

    # Steps between checkpoints in STORE/checkpoints, and one at the end; 0 is none. The
    # last three are kept, each in the space of one more copy of the state. A run goes
    # on from one after: jaxinf checkpoint restore STORE NAME.
    checkpoint_every: int = 0

    # Export these steps to a URL of file://, gs:// or s3://, with a folder for each.
    # The next update waits for it. If an export fails, training goes on, and the exit
    # status is 3.
    export_to: Annotated[str | None, _flag("URL", "none")] = None

    # --- several processes ------------------------------------------------------------

    # One of several processes of a run. SLURM, Open MPI and Kubernetes say which;
    # elsewhere give the address of process 0, which coordinates, the number of
    # processes, and that of this one, from 0: 10.0.0.1:1234,4,0.
    distributed: Annotated[
        str | None, _LAUNCH, _flag("[HOST:PORT,N,I]", "one process")
    ] = None

    # Go on with what this start has: divide the store among its processes and devices,
    # and replace a kept plan of --mode stream that does not fit its --memory, its
    # devices or its --device-updates. Bits may differ from then on.
    elastic: bool = False

    # For --distributed: params are sharded over all devices, each on its longest
    # dimension that they divide. Without it they are replicated, and only the
    # optimizer's state is divided.
    fsdp: bool = False

    # --- output -----------------------------------------------------------------------

    # Directory for metrics.jsonl (a line for each step), validation.jsonl, config.json,
    # config.toml.
    log_dir: Annotated[
        Path | None, _flag("DIR", "STORE-log; runs/memory in --mode memory")
    ] = None

    # Steps between evaluations on at most 64 batches of the held-out data, always the
    # same; 0 is at the end only. The step of the lowest loss is kept as a checkpoint
    # named best, one more copy of the state.
    eval_every: int = 0

    # Record what each thread, drive and JAX device does in three early steps, by
    # jax.profiler in LOG_DIR/trace; ui.perfetto.dev opens the perfetto_trace.json.gz
    # there.
    trace: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    # --- no flags ---------------------------------------------------------------------

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
        config = dataclasses.replace(
            self._base_config, dtype=self.dtype, param_dtype=self.param_dtype
        )
        return config_for(config, self.task_name, num_labels=self.num_labels)

    @property
    def _base_config(self) -> ModelConfig:
        """The model's configuration by its files or a preset."""
        if self.source is not None or self.model_file is not None:
            assert self.files is not None, "check reads them"
            return self.files.config
        return MODELS[self.model].presets[self.preset]

    @property
    def model_file(self) -> Path | None:
        return Path(self.preset) if self.preset.endswith(".json") else None

    @property
    def task_name(self) -> TaskName:
        """The configured task, or the model's usual one."""
        return self.task or self.family.tasks[0]

    @property
    def family(self) -> ModelFamily:
        return family_of(self._base_config)

    @property
    def model_name(self) -> str:
        """The architecture and its size, for people."""
        place = self.source or self.model_file
        if place is None:
            return f"{self.model} {self.preset}"
        return f"{self.family.name} of {place}"

    @property
    def takes_images(self) -> bool:
        return hasattr(self.model_config, "image_size")

    @property
    def compression(self) -> TopK | None:
        return _parse_flag("compress", self.compress, parse_compression)

    @property
    def adapters(self) -> Lora | None:
        return _parse_flag("lora", self.lora, parse_lora)

    @property
    def lora_alpha(self) -> float:
        return DEFAULT_ALPHA if self.adapters is None else self.adapters.alpha

    @property
    def average(self) -> Average | None:
        return _parse_flag(f"ema {self.ema}:", self.ema, parse_ema)

    @property
    def frozen(self) -> FrozenLeaves:
        """The leaves that are not trained, by `freeze` or `lora`."""
        if self.adapters is None:
            return FrozenLeaves(self.freeze)
        has_classes = self.task_name == "classification"
        return self.adapters.frozen_leaves(trains_head=has_classes)

    @property
    def abstract(self) -> tuple[Any, PyTree]:
        """The model's graph, and shapes and dtypes of the run's params."""
        graphdef, params = abstract_params(self.model_config)
        if self.adapters is not None:
            params = jax.eval_shape(
                functools.partial(add_adapters, self.adapters), params
            )
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
        """Returns all fields of the run as JSON, paths as text."""
        names = [field.name for field in dataclasses.fields(self)]
        document = {n: getattr(self, n) for n in names if n not in _NOT_RECORDED}
        return json.loads(json.dumps(document, default=str))


_NOT_RECORDED = ("files", "run_file", "trace")

FLAGS = {
    {"run_file": "config", "source": "from"}.get(field.name)
    or field.name.replace("_", "-"): field
    for field in dataclasses.fields(TrainConfig)
    if field.name not in ("files", "num_labels")
}
"""Fields by the names of their flags."""
