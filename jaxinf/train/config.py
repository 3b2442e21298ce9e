"""The configuration of a training run, which is also its command line.

Invariant: a field exists only if it works, and no combination of fields is ignored in
silence: `check` refuses combinations without a meaning.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import tyro
from jaxinf_models import (
    MODELS,
    ModelConfig,
    ModelFamily,
    TaskName,
    config_for,
    family_of,
)

from jaxinf.command_line import ByteSize, UsageError
from jaxinf.compress import TopK, parse_compression
from jaxinf.csd import parse_csd
from jaxinf.engine import (
    DEFAULT_MEMORY_BYTES,
    Durability,
    MasterChoice,
    StateFormat,
    VerifyMode,
)
from jaxinf.program import Average, parse_ema
from jaxinf.streaming import Form, Policy, check_resident
from jaxinf.terminal import parse_bytes
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.options import DataOptions, check_options
from jaxinf.train.data.options import shown as _shown
from jaxinf.train.pretrained import ModelFiles
from jaxinf.typing import JsonValue

__all__ = ["TrainConfig", "check"]

ModelName: TypeAlias = Literal["gpt2", "bert", "t5", "vit", "bloom", "llama"]
DTypeName: TypeAlias = Literal["float32", "bfloat16"]
ScheduleName: TypeAlias = Literal["constant", "cosine", "linear", "wsd"]
ReferenceName: TypeAlias = Literal["fused", "split"]


def _parse_durability(text: str) -> Durability:
    if text in ("step", "checkpoint"):
        return "step" if text == "step" else "checkpoint"
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r}: expected step, checkpoint, or a number of steps")
    return int(text)


_DURABILITY = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="{step,INT,checkpoint}",
    instance_from_str=lambda words: _parse_durability(words[0]),
    is_instance=lambda value: isinstance(value, int | str),
    str_from_instance=lambda value: [str(value)],
)


def _parse_state_tier(text: str) -> int:
    tier, _, num_bytes = text.partition("=")
    if tier != "host" or not num_bytes:
        raise ValueError(f"{text!r}: expected host=BYTES, such as host=2GiB")
    return parse_bytes(num_bytes)


_STATE_TIER = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="host=BYTES",
    instance_from_str=lambda words: _parse_state_tier(words[0]),
    is_instance=lambda value: isinstance(value, int | None),
    str_from_instance=lambda value: ["none" if value is None else f"host={value}"],
)


@dataclasses.dataclass(frozen=True)
class TrainConfig(DataOptions):
    """Trains a model, with the optimizer's state on drives.

    Every step is committed to the store, which is the checkpoint: the same command
    resumes a run that was stopped, at exactly the next batch. The defaults train a
    small GPT-2 on bytes of text, in some two minutes on two CPU cores.
    """

    # The comment above a field is its text in --help.

    # Directory of the store: a new one, or the store of a run to resume.
    store: Annotated[Path | None, _shown("DIR", "none; --mode update needs it")] = None

    # Train up to this number of batches in all, including those of earlier runs.
    steps: int = 1000

    # update: the optimizer's state is in the store and is updated beside the drive.
    # stream: params, too, are in the store, and pass through --memory bytes; for models
    # larger than memory. memory: plain optax with all state in memory, and nothing is
    # kept; the baseline.
    mode: Literal["update", "stream", "memory"] = "update"

    # For --mode stream: host memory of a step, such as 4GiB, in addition to some 400 MB
    # of the process itself. It takes the place of --memory-bytes.
    memory: Annotated[int | None, ByteSize, _shown("BYTES", "none")] = None

    # For --mode stream: memory of the JAX device for params, activations and
    # temporaries; by default most of what is free. On a CPU it limits that part of
    # --memory.
    device_memory: Annotated[int | None, ByteSize, _shown("BYTES", "none")] = None

    # For --mode stream. recompute: activations are computed again for the backward
    # pass. keep: they stay in memory. offload: those that --memory has no room for are
    # on the drive meanwhile. plan: whichever makes a step fastest, by the times of the
    # first steps. The bits are the same.
    policy: Policy = "recompute"

    # For --policy offload: the form of floating-point activations on the drive. Losses
    # keep their bits, gradients do not (docs/streaming.md).
    activations: Annotated[Form | None, _shown("{bf16,int8}", "none")] = None

    # For --mode stream: params that stay in memory between steps: all (params), or so
    # many bytes of them, such as 2GiB, which are a part of --memory.
    resident: Annotated[str | None, _shown("{params,BYTES}", "none")] = None

    # For --mode stream: parts of a batch that run one after another, so that
    # activations take the memory of a part; their gradients are averaged.
    micro_batches: int = 1

    # For --mode stream: rated writes of the drives, in TB. A run warns if its steps
    # wear them out within a year. By default the summary is for common classes.
    endurance_tbw: Annotated[float | None, _shown("TB", "none")] = None

    # For --mode stream: replace a plan kept in the store that does not fit --memory.
    replan: bool = False

    # For --mode memory. fused: one jit for the whole step, the fastest. split: three
    # jits, for loss and gradients, the optimizer's update, and the addition; its losses
    # are those of --mode update to the bit (adamw, adam, sgd, lion, adagrad, on CPU).
    reference: ReferenceName = "fused"

    # The architecture.
    model: ModelName = "gpt2"

    # The model's size, by the name of a preset of the architecture. For gpt2: nano has
    # 0.9 M params, small 124 M, medium 355 M, large 774 M and xl 1558 M.
    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"

    # A model of a size of your own: a file in the form of Hugging Face's config.json,
    # which sets architecture and size in place of --model and --preset
    # (docs/models.md).
    model_file: Annotated[
        Path | None,
        tyro.conf.arg(
            name="model-config", metavar="FILE", help_behavior_hint="(default: none)"
        ),
    ] = None

    # Start from the weights in a Hugging Face checkpoint folder. Its config.json sets
    # architecture and size, so give neither --model nor --preset. With --steps 0 the
    # weights are imported into the store, leaf by leaf, and nothing is trained.
    source: Annotated[
        Path | None,
        tyro.conf.arg(
            name="from", metavar="DIR", help_behavior_hint="(default: new weights)"
        ),
    ] = None

    # The task: predict the next token, masked tokens, an answer to a text, or a class.
    # By default the usual task of the model.
    task: Annotated[
        TaskName | None,
        _shown("{causal-lm,masked-lm,seq2seq,classification}", "the model's"),
    ] = None

    # Sequences or images in a step.
    batch_size: int = 8

    # Tokens in a sequence; without a --tokenizer a token is a byte. Longer sequences
    # cost more; for nano, 64 is nearly as good as more.
    seq_len: Annotated[
        int | None,
        _shown("INT", "64; with --from the longest example, at most 1024"),
    ] = None

    # The name of an optimizer of optax or optax.contrib. Arguments without a flag here
    # have optax's defaults. docs/optimizers.md lists the optimizers that can run near
    # storage; --mode memory takes the others, too.
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw"

    # More arguments of that optimizer, such as: b2=0.95 nesterov=true mu_dtype=bfloat16
    optimizer_args: Annotated[tuple[str, ...], _shown("KEY=VALUE...", "optax's")] = ()

    # Peak learning rate. Required for optimizers other than adam and adamw.
    learning_rate: Annotated[
        float | None,
        _shown(
            "RATE",
            "by size: 2e-3 nano, 6e-4 at 124 M, 2e-4 at 1.5 B params; with --from a "
            "tenth",
        ),
    ] = None

    # Decoupled weight decay, for adamw and lion.
    weight_decay: Annotated[float | None, _shown("FACTOR", "0.1; 0 with --from")] = None

    # Momentum of sgd; with 0 none is stored.
    momentum: Annotated[float | None, _shown("FACTOR", "0.9")] = None

    # The learning rate after the warm-up: constant; falling as a cosine to a tenth at
    # --steps; falling linearly to 0 there; or wsd, constant until the last fifth of
    # --steps, in which it falls linearly to 0. Use constant if you may extend the run
    # later: it can end with wsd.
    schedule: ScheduleName = "constant"

    # Steps in which the learning rate rises linearly to its peak.
    warmup_steps: Annotated[int | None, _shown("INT", "50; 30 with --from")] = None

    # Clip gradients to this global norm; 0 is off. With clipping, updates start only
    # when all gradients are known.
    clip_norm: float = 1.0

    # Send only a part of each gradient to the drives: top_k:0.02 sends its largest
    # elements, in 2 % of the dense bytes. Options may follow, separated by commas:
    # warmup_steps=N, error_feedback=true, values=bfloat16 or float16, selection=exact.
    # Gradients are clipped first. In --mode memory the other elements are set to
    # zero. docs/compression.md shows the cost in quality.
    compress: Annotated[str | None, _shown("top_k:RATIO", "none")] = None

    # Keep a moving average of the params in the store, with this decay: 0.999. Options
    # may follow, separated by commas: start=N (begin at that step), every=N (average
    # every N steps), debias=true, form=bf16 (2 bytes a param, rounded stochastically).
    # docs/integrations.md, "EMA of params", says how to read it.
    ema: Annotated[str | None, _shown("DECAY", "none")] = None

    # With --ema: evaluate, sample and choose the best step by the average.
    eval_average: bool = False

    # Seed of the initial params, the batches and the sample.
    seed: int = 0

    # Dtype of activations and matrix products.
    dtype: DTypeName = "float32"

    # Dtype of the params on the JAX device. The store keeps fp32 masters in both cases,
    # except with --master none; in --mode memory bfloat16 params have no master.
    param_dtype: DTypeName = "float32"

    # A mounted drive to spread a new store's chunks over; repeat it for more drives.
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]], _shown("DIR", "the store itself")
    ] = ()

    # The processor that updates the chunks: host, the CPU; smartssd, the card beside
    # the drive; emulated, an emulated card. Options may follow, such as
    # emulated:drive=1.5GB/s,link=3GB/s. See docs/cards.md.
    csd: Annotated[str, _shown("host|smartssd|emulated", "host")] = "host"

    # Memory for the buffers through which the store's state passes, such as 512MiB or
    # 2G: of the host, or of each card.
    memory_bytes: Annotated[int, ByteSize] = DEFAULT_MEMORY_BYTES

    # Steps to commit: every step (step), every n-th one (a number), or checkpoints
    # alone (checkpoint). A crash loses the steps since the last commit.
    durability: Annotated[Durability, _DURABILITY] = "step"

    # Memory, part of that for state, which holds state from step to step: host=2GiB. It
    # is not read again, and written by steps that commit alone (see durability).
    state_tier: Annotated[int | None, _STATE_TIER, _shown("host=BYTES", "none")] = None

    # Whether the checksums of chunks are verified at each read: always or never.
    verify: VerifyMode = "always"

    # Format of the optimizer's float32 state in a new store: fp32, bfloat16 with
    # stochastic rounding, or 8 bits with a scale for each 256 elements. The update
    # computes in float32 in any case.
    state: Annotated[
        StateFormat | None, _shown("{fp32,bf16,int8}", "fp32, or what the store has")
    ] = None

    # The master of bfloat16 params in a new store. auto: the params and 16-bit
    # remainders, so that no bit is lost. stored: float32, read at every step. none: the
    # params alone, rounded stochastically. float32 params are their own master; with
    # stored they are still read from the drive.
    master: MasterChoice = "auto"

    # Steps between checkpoints in STORE/checkpoints, and one at the end; 0 is none.
    # Each takes the space of one more copy of the state on the drives.
    checkpoint_every: int = 0

    # The number of latest checkpoints to keep; 0 keeps all.
    keep_last: int = 3

    # Also keep checkpoints whose step is a multiple of this; 0 is none.
    keep_every: int = 0

    # Continue from this checkpoint of the store, given by name.
    restore: Annotated[str | None, _shown("NAME", "none: go on where the run is")] = (
        None
    )

    # A gradient with NaN or Inf: end the run before that step, or skip the batch.
    nonfinite: Literal["error", "skip"] = "error"

    # One of several processes with JAX devices, which train together: each has a part
    # of each batch, and its member of the run in the store. SLURM, Open MPI and
    # Kubernetes say who they are; elsewhere give the next three.
    distributed: bool = False

    # For --distributed: address of process 0, which coordinates.
    coordinator: Annotated[
        str | None, _shown("HOST:PORT", "what the environment says")
    ] = None

    # For --distributed: number of processes.
    num_processes: Annotated[int | None, _shown("N", "what the environment says")] = (
        None
    )

    # For --distributed: number of this process, from 0.
    process_id: Annotated[int | None, _shown("I", "what the environment says")] = None

    # For --distributed: params are sharded over all devices, each on its longest
    # dimension that they divide. Without it they are replicated, and only the
    # optimizer's state is divided.
    fsdp: bool = False

    # Directory for metrics.jsonl (a line for each step), validation.jsonl, config.json.
    log_dir: Annotated[
        Path | None, _shown("DIR", "STORE-log; runs/memory in --mode memory")
    ] = None

    # Steps between evaluations on the held-out data; 0 is at the end only.
    eval_every: int = 0

    # With --eval-every, keep the step of the lowest validation loss as a checkpoint
    # named best. Like any checkpoint it takes the space of one more copy of the state.
    keep_best: bool = True

    # Number of tokens to generate at the end; 0 is none.
    sample_bytes: Annotated[
        int | None, _shown("INT", "200, fewer where that would take long")
    ] = None

    # What --from or --model-config names, as `check` has read it. No flag.
    files: Annotated[ModelFiles | None, tyro.conf.Fixed, tyro.conf.Suppress] = None

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
        """The architecture."""
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
        """The compression that `compress` names.

        Raises:
          UsageError: `compress` does not parse.
        """
        try:
            return None if self.compress is None else parse_compression(self.compress)
        except ValueError as error:
            raise UsageError(f"--compress {error}") from error

    @property
    def average(self) -> Average | None:
        """The average that `ema` names.

        Raises:
          UsageError: `ema` does not parse.
        """
        try:
            return None if self.ema is None else parse_ema(self.ema)
        except ValueError as error:
            raise UsageError(f"--ema {self.ema}: {error}") from error

    @property
    def logs(self) -> Path:
        """The log directory, absolute."""
        if self.log_dir is not None:
            return self.log_dir.expanduser().absolute()
        if self.store is None:
            return Path("runs/memory").absolute()
        store = self.store.expanduser().absolute()
        return store.with_name(store.name + "-log")

    def to_json(self) -> dict[str, JsonValue]:
        """All fields as JSON, paths as text."""
        names = [field.name for field in dataclasses.fields(self)]
        return {n: _plain(getattr(self, n)) for n in names if n != "files"}


def check(config: TrainConfig) -> TrainConfig:
    """Refuses a config with invalid or contradictory fields; reads the model's files.

    Returns:
      The config with its `files`.

    Raises:
      UsageError: names the flag, the value found and the remedy.
      ExchangeError: the files of --from or --model-config cannot be read.
    """
    _check_ranges(config)
    config = _with_files(config)
    _check_model(config)
    try:
        check_options(config, config.task_name, takes_images=config.takes_images)
    except DataError as error:
        raise UsageError(str(error)) from error
    _check_optimizer(config)
    _check_compression(config)
    if config.average is None and config.eval_average:
        raise UsageError("--eval-average: give --ema DECAY, which keeps an average")
    _check_streaming(config)
    _check_processes(config)
    try:
        parse_csd(config.csd)
    except ValueError as error:
        raise UsageError(f"--csd: {error}") from error
    if config.mode == "memory":
        _check_memory_mode(config)
    elif config.reference != "fused":
        raise UsageError(
            "--reference: --mode update has the bits of the split reference as it is; "
            "leave it out, or give --mode memory"
        )
    elif config.store is None:
        raise UsageError(
            "--store: expected a directory for the optimizer's state, got nothing; "
            "name one (it may be new), or give --mode memory to train without"
        )
    elif config.master == "none" and config.param_dtype != "bfloat16":
        raise UsageError(
            "--master none: expected --param-dtype bfloat16, got "
            f"{config.param_dtype}; float32 params are their own master: leave it out"
        )
    elif config.logs.is_relative_to(config.store.expanduser().absolute()):
        raise UsageError(
            f"--log-dir {config.logs}: expected a place outside the store "
            f"{config.store}, which holds nothing but the store's own files"
        )
    return config


def _check_compression(config: TrainConfig) -> None:
    compression = config.compression
    if compression is None or not compression.error_feedback:
        return
    if config.mode == "stream" and config.clip_norm:
        raise UsageError(
            f"--compress {config.compress}: with --mode stream the global norm would "
            "miss what error feedback adds; give --clip-norm 0, or leave error "
            "feedback out"
        )
    if config.mode != "memory" and config.durability not in ("step", 1):
        raise UsageError(
            f"--compress {config.compress}: each step commits its error feedback, "
            f"expected --durability step, got {config.durability}; leave error "
            "feedback out, or commit each step"
        )


def _check_ranges(config: TrainConfig) -> None:
    for name, least in (
        ("steps", 1 if config.source is None else 0),
        ("batch_size", 1),
        ("seq_len", 2),
        ("memory_bytes", 1),
        ("memory", 1),
        ("device_memory", 1),
        ("micro_batches", 1),
        ("warmup_steps", 0),
        ("clip_norm", 0),
        ("seed", 0),
        ("eval_every", 0),
        ("checkpoint_every", 0),
        ("keep_last", 0),
        ("keep_every", 0),
        ("sample_bytes", 0),
        ("weight_decay", 0),
        ("momentum", 0),
    ):
        value = getattr(config, name)
        if value is not None and not value >= least:
            also = "; 0 imports what --from names" if name == "steps" and least else ""
            raise UsageError(
                f"{_flag(name)}: expected at least {least}, got {value}{also}"
            )
    if config.seed >= 1 << 32:
        raise UsageError(f"--seed: expected less than 2**32, got {config.seed}")
    if config.learning_rate is not None and not config.learning_rate > 0:
        raise UsageError(
            f"--learning-rate: expected more than 0, got {config.learning_rate}"
        )


def _with_files(config: TrainConfig) -> TrainConfig:
    """Reads the files that --from or --model-config names in place of a preset."""
    if config.source is not None:
        _check_source(config)
        return dataclasses.replace(config, files=ModelFiles.of_folder(config.source))
    if config.model_file is not None:
        _check_source(config)
        files = ModelFiles.of_config(config.model_file)
        return dataclasses.replace(config, files=files)
    presets = MODELS[config.model].presets
    if config.preset not in presets:
        raise UsageError(
            f"--preset: expected one of {config.model}'s, {', '.join(presets)}, got "
            f"{config.preset}"
        )
    return config


def _check_model(config: TrainConfig) -> None:
    tasks = config.family.tasks
    if config.task_name not in tasks:
        able = [name for name, m in MODELS.items() if config.task_name in m.tasks]
        raise UsageError(
            f"--task {config.task_name}: expected one of {config.family.name}'s, "
            f"{', '.join(tasks)}; --model with that task: {', '.join(able)}"
        )
    if config.seq_len is None:
        return
    if config.takes_images:
        raise UsageError("--seq-len: the model takes images; leave it out")
    limit = getattr(config.model_config, "num_positions", None)
    if limit is not None and config.seq_len > limit and config.steps:
        owner = config.source or config.model_file or f"preset {config.preset}"
        raise UsageError(
            f"--seq-len: expected at most {limit}, the positions of {owner}, got "
            f"{config.seq_len}"
        )


def _check_source(config: TrainConfig) -> None:
    """Refuses flags that contradict the config.json of --from or --model-config."""
    given = f"--from {config.source}"
    others = ["model", "preset", "model_file"]
    if config.source is None:
        given = f"--model-config {config.model_file}"
        others.remove("model_file")
    for field in dataclasses.fields(config):
        if field.name in others and getattr(config, field.name) != field.default:
            flag = _flag(field.name.replace("file", "config"))
            raise UsageError(f"{flag}: {given} says which model it is; leave it out")
    if config.mode == "memory" and not config.steps:
        raise UsageError(
            "--steps 0: --mode memory has no store to import into; leave it out, or "
            "give a --store"
        )


def _check_optimizer(config: TrainConfig) -> None:
    if config.weight_decay is not None and config.optimizer not in ("adamw", "lion"):
        raise UsageError(
            f"--weight-decay: expected with adamw or lion, got --optimizer "
            f"{config.optimizer}; leave it out, or, where the optimizer has it, give "
            f"--optimizer-args weight_decay={config.weight_decay:g}"
        )
    if config.momentum is not None and config.optimizer != "sgd":
        raise UsageError(
            f"--momentum: expected with sgd, got --optimizer {config.optimizer}; leave "
            "it out, or, where the optimizer has it, give --optimizer-args "
            f"momentum={config.momentum:g}"
        )


_OF_STREAMING = ("memory", "device_memory", "policy", "resident", "micro_batches")
_OF_STREAMING += ("replan", "activations", "endurance_tbw")
_NOT_STREAMED = ("memory_bytes", "reference")


def _check_streaming(config: TrainConfig) -> None:
    """Refuses flags of --mode stream in other modes, and of others in it."""
    is_streamed = config.mode == "stream"
    for field in dataclasses.fields(config):
        is_refused = field.name in (_NOT_STREAMED if is_streamed else _OF_STREAMING)
        if is_refused and getattr(config, field.name) != field.default:
            raise UsageError(
                f"{_flag(field.name)}: --mode {config.mode} does not have it; leave it "
                f"out{_IN_PLACE.get(field.name, '')}"
            )
    if not is_streamed:
        return
    if config.memory is None:
        raise UsageError(
            "--memory: expected the bytes of host memory that a step may take, such as "
            "4GiB, got nothing; --mode stream needs it"
        )
    try:
        check_resident(config.resident)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    if config.activations is not None and config.policy in ("recompute", "keep"):
        raise UsageError(
            f"--activations {config.activations}: no activation leaves with --policy "
            f"{config.policy}; leave it out, or give --policy offload"
        )
    if not config.steps:
        raise UsageError(
            "--steps 0: imports in --mode update; go on with --mode stream and the "
            "same --store"
        )


_IN_PLACE = {
    "memory_bytes": ", and give --memory",
    "memory": ", and give --memory-bytes, or --mode stream",
    "device_memory": ", or give --mode stream",
    "policy": ", or give --mode stream",
    "activations": ", or give --mode stream",
    "resident": ", or give --mode stream",
    "micro_batches": ", or give --mode stream",
    "replan": ", or give --mode stream",
    "endurance_tbw": ", or give --mode stream",
}


_OF_THE_STORE = ("store", "csd_root", "csd", "memory_bytes", "durability", "verify")
_OF_THE_STORE += (
    "state_tier",
    "state",
    "master",
    "ema",
    "checkpoint_every",
    "keep_last",
    "keep_every",
    "keep_best",
    "restore",
)


def _check_processes(config: TrainConfig) -> None:
    """Refuses flags of several processes in one, and modes that need one process."""
    names = ("coordinator", "num_processes", "process_id", "fsdp")
    for name in names:
        if not config.distributed and getattr(config, name) not in (None, False):
            raise UsageError(
                f"{_flag(name)}: expected with --distributed; add that, or leave it out"
            )
    if config.distributed and (config.mode == "stream" or not config.steps):
        what = "--mode stream" if config.steps else "--steps 0"
        raise UsageError(
            f"--distributed: {what} runs in one process; leave --distributed out, or "
            "train with --mode update"
        )


def _check_memory_mode(config: TrainConfig) -> None:
    """Refuses the flags of a store, which --mode memory does not have."""
    for field in dataclasses.fields(config):
        is_of_store = field.name in _OF_THE_STORE
        if is_of_store and getattr(config, field.name) != field.default:
            raise UsageError(
                f"{_flag(field.name)}: --mode memory keeps nothing on drives; leave "
                "it out, or give --mode update"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(value: object) -> JsonValue:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
