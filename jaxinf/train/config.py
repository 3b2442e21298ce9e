"""What a training run is: one frozen dataclass, which is also the command line.

Invariant: a field exists only if it works, and no combination of fields is ignored in
silence: `check` refuses what cannot mean anything.
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

from jaxinf.compress import TopK, parse_compression
from jaxinf.csd import parse_csd
from jaxinf.engine import (
    DEFAULT_MEMORY_BYTES,
    Durability,
    MasterChoice,
    StateFormat,
    VerifyMode,
)
from jaxinf.terminal import format_bytes, parse_bytes
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.options import DataOptions, check_options
from jaxinf.train.data.options import shown as _shown
from jaxinf.train.pretrained import read_model_config
from jaxinf.typing import JsonValue

__all__ = ["TrainConfig", "UsageError", "check"]

ModelName: TypeAlias = Literal["gpt2", "bert", "t5", "vit", "bloom", "llama"]
DTypeName: TypeAlias = Literal["float32", "bfloat16"]
ScheduleName: TypeAlias = Literal["constant", "cosine"]
ReferenceName: TypeAlias = Literal["fused", "split"]


class UsageError(Exception):
    """The command line asks for something that cannot be done; exit status 2."""


_BYTES = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: parse_bytes(words[0]),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [format_bytes(value).replace(" ", "")],
)


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


@dataclasses.dataclass(frozen=True)
class TrainConfig(DataOptions):
    """Trains a model, with the optimizer's state on drives.

    Every step is committed to the store, which is the checkpoint: the same command
    resumes a run that was stopped, at exactly the next batch. The defaults train a
    small GPT-2 on bytes of text, in some two minutes on two CPU cores.
    """

    # The comment above a field is its text in --help.

    # Directory of the store: a new one, or that of a run to resume.
    store: Annotated[Path | None, _shown("DIR", "none; --mode update needs it")] = None

    # Train until this many batches in all; a resumed run counts those it has done.
    steps: int = 1000

    # update: the optimizer's state is in the store, updated beside the drive. memory:
    # plain optax with all state in memory, nothing kept; the baseline to compare with.
    mode: Literal["update", "memory"] = "update"

    # For --mode memory. fused: one jit for the whole step, the fastest. split: loss and
    # gradients, the optimizer's update and the addition are three jits, whose losses
    # --mode update has to the bit (adamw, adam, sgd, lion and adagrad, on CPU).
    reference: ReferenceName = "fused"

    # The architecture.
    model: ModelName = "gpt2"

    # Its size, by the name of one of the architecture's presets. gpt2: nano has 0.9 M
    # params, small 124 M, medium 355 M, large 774 M and xl the full 1558 M.
    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"

    # Begin with the weights of a Hugging Face checkpoint folder, whose config.json then
    # says architecture and size; give neither --model nor --preset. With --steps 0 they
    # are imported into the store, leaf by leaf, and nothing is trained.
    source: Annotated[
        Path | None,
        tyro.conf.arg(
            name="from", metavar="DIR", help_behavior_hint="(default: new weights)"
        ),
    ] = None

    # What the model learns: the next token, hidden tokens, an answer to a text, or a
    # class. Its usual task by default.
    task: Annotated[
        TaskName | None,
        _shown("{causal-lm,masked-lm,seq2seq,classification}", "the model's"),
    ] = None

    # Sequences a step, or images.
    batch_size: int = 8

    # Tokens a sequence, which are bytes without a --tokenizer. The cost grows with it;
    # nano learns most of what it can at 64.
    seq_len: int = 64

    # An optimizer of optax or optax.contrib by name, with optax's own defaults for what
    # has no flag here. docs/optimizers.md lists which can run near storage; --mode
    # memory takes the others too.
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw"

    # More arguments of that optimizer, such as: b2=0.95 nesterov=true mu_dtype=bfloat16
    optimizer_args: Annotated[tuple[str, ...], _shown("KEY=VALUE...", "optax's")] = ()

    # Peak learning rate. Optimizers other than adam and adamw must name it.
    learning_rate: Annotated[
        float | None,
        _shown("RATE", "by size: 2e-3 nano, 6e-4 at 124 M, 2e-4 at 1.5 B params"),
    ] = None

    # Decoupled weight decay, for adamw and lion.
    weight_decay: Annotated[float | None, _shown("FACTOR", "0.1")] = None

    # For sgd; 0 stores no momentum.
    momentum: Annotated[float | None, _shown("FACTOR", "0.9")] = None

    # The learning rate after the warm-up: constant, or falling in a cosine to a tenth
    # at --steps. A run that may be extended later wants constant.
    schedule: ScheduleName = "constant"

    # Steps in which the learning rate rises in a line to its peak.
    warmup_steps: int = 50

    # Clip gradients to this global norm; 0 is off. With clipping no update starts
    # before all gradients are there.
    clip_norm: float = 1.0

    # Send only a part of each gradient to the drives: top_k:0.02 sends its largest
    # elements, in 2 % of the dense bytes. After the ratio may follow, with commas:
    # warmup_steps=N, error_feedback=true, values=bfloat16 or float16, selection=exact.
    # Gradients are clipped first. In --mode memory the rest is zeroed. See
    # docs/compression.md for what it costs.
    compress: Annotated[str | None, _shown("top_k:RATIO", "none")] = None

    # Decides the initial params, the batches and the sample.
    seed: int = 0

    # Of activations and matrix products.
    dtype: DTypeName = "float32"

    # Of the params in the JAX device's memory. The store keeps fp32 masters either way,
    # unless --master none; in --mode memory bfloat16 params are all there is.
    param_dtype: DTypeName = "float32"

    # A mounted drive to spread a new store's chunks over; repeat it for more drives.
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]], _shown("DIR", "the store itself")
    ] = ()

    # What updates the chunks: host, the CPU beside the drive; smartssd, the card beside
    # it; emulated, cards that are not there. Options may follow, such as
    # emulated:drive=1.5GB/s,link=3GB/s. See docs/cards.md.
    csd: Annotated[str, _shown("host|smartssd|emulated", "host")] = "host"

    # All memory that the store's state may pass through, such as 512MiB or 2G: of the
    # host, or of each card.
    memory_bytes: Annotated[int, _BYTES] = DEFAULT_MEMORY_BYTES

    # When a step is durable: each one at once (step), every so many (a number), or only
    # those that are kept (checkpoint). A crash costs the steps since.
    durability: Annotated[Durability, _DURABILITY] = "step"

    # Whether chunks that are read are compared with their checksums: always or never.
    verify: VerifyMode = "always"

    # How a new store holds the optimizer's float32 state: as it is, rounded
    # stochastically to bfloat16, or in 8 bits with a scale for each 256. The update
    # computes in float32 in any case.
    state: Annotated[
        StateFormat | None, _shown("{fp32,bf16,int8}", "fp32, or what the store has")
    ] = None

    # The master of bfloat16 params in a new store. auto: the params and, beside them,
    # 16-bit remainders, so that nothing is lost. stored: float32, read at every step.
    # none: the params alone, rounded stochastically. float32 params are their own
    # master, which stored reads nevertheless.
    master: MasterChoice = "auto"

    # Keep a checkpoint in STORE/checkpoints every so many steps, and at the end; 0 is
    # none. It costs links, and the drives' room for one more copy of the state.
    checkpoint_every: int = 0

    # Of those, keep the latest so many; 0 keeps all.
    keep_last: int = 3

    # And keep those whose step is a multiple of this for good; 0 is none.
    keep_every: int = 0

    # Go back to this checkpoint of the store, by name, before going on.
    restore: Annotated[str | None, _shown("NAME", "none: go on where the run is")] = (
        None
    )

    # A gradient with NaN or Inf: end the run before that step, or skip the batch.
    nonfinite: Literal["error", "skip"] = "error"

    # Where metrics.jsonl (a line a step), validation.jsonl and config.json go.
    log_dir: Annotated[
        Path | None, _shown("DIR", "STORE-log; runs/memory in --mode memory")
    ] = None

    # Evaluate on what is held out every so many steps; 0 is at the end only.
    eval_every: int = 0

    # With --eval-every, keep the step of the lowest validation loss as a checkpoint
    # named best. Like any checkpoint it takes room for one more copy of the state.
    keep_best: bool = True

    # Tokens of text generated at the end; 0 is none.
    sample_bytes: Annotated[
        int | None, _shown("INT", "200, fewer where that would take long")
    ] = None

    @property
    def model_config(self) -> ModelConfig:
        """Shape and precision of the model, with the head of its task."""
        if self.source is None:
            base = self.family.presets[self.preset]
        else:
            base = read_model_config(self.source)
        precise = dataclasses.replace(
            base, dtype=self.dtype, param_dtype=self.param_dtype
        )
        return config_for(precise, self.task_name, num_labels=self.num_labels)

    @property
    def task_name(self) -> TaskName:
        """The task given, or the model's usual one."""
        return self.task or self.family.tasks[0]

    @property
    def family(self) -> ModelFamily:
        """The architecture."""
        if self.source is None:
            return MODELS[self.model]
        return family_of(read_model_config(self.source))

    @property
    def model_name(self) -> str:
        """The architecture and its size, for people."""
        if self.source is None:
            return f"{self.model} {self.preset}"
        return f"{self.family.name} of {self.source}"

    @property
    def takes_images(self) -> bool:
        """Whether the model looks at images instead of tokens."""
        return hasattr(self.model_config, "image_size")

    @property
    def compression(self) -> TopK | None:
        """What `compress` says.

        Raises:
          UsageError: it says nothing that is known.
        """
        try:
            return None if self.compress is None else parse_compression(self.compress)
        except ValueError as error:
            raise UsageError(f"--compress {error}") from error

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
        fields = dataclasses.asdict(self)
        return {name: _plain(value) for name, value in fields.items()}


def check(config: TrainConfig) -> None:
    """Refuses a config that cannot mean anything.

    Raises:
      UsageError: names the flag, what it found and what to do.
    """
    _check_ranges(config)
    _check_model(config)
    try:
        check_options(config, config.task_name, takes_images=config.takes_images)
    except DataError as error:
        raise UsageError(str(error)) from error
    _check_optimizer(config)
    _check_compression(config)
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


def _check_compression(config: TrainConfig) -> None:
    compression = config.compression
    if compression is None or not compression.error_feedback:
        return
    if config.mode == "update" and config.durability not in ("step", 1):
        raise UsageError(
            f"--compress {config.compress}: what a step leaves out is part of its "
            f"commit, expected --durability step, got {config.durability}; leave error "
            "feedback out, or commit each step"
        )


def _check_ranges(config: TrainConfig) -> None:
    for name, least in (
        ("steps", 1 if config.source is None else 0),
        ("batch_size", 1),
        ("seq_len", 2),
        ("memory_bytes", 1),
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
            raise UsageError(f"{_flag(name)}: expected at least {least}, got {value}")
    if config.seed >= 1 << 32:
        raise UsageError(f"--seed: expected less than 2**32, got {config.seed}")
    if config.learning_rate is not None and not config.learning_rate > 0:
        raise UsageError(
            f"--learning-rate: expected more than 0, got {config.learning_rate}"
        )


def _check_model(config: TrainConfig) -> None:
    presets = MODELS[config.model].presets
    if config.source is not None:
        _check_source(config)
    elif config.preset not in presets:
        raise UsageError(
            f"--preset: expected one of {config.model}'s, {', '.join(presets)}, got "
            f"{config.preset}"
        )
    tasks = config.family.tasks
    if config.task_name not in tasks:
        able = [name for name, m in MODELS.items() if config.task_name in m.tasks]
        raise UsageError(
            f"--task {config.task_name}: expected one of {config.family.name}'s, "
            f"{', '.join(tasks)}; --model with that task: {', '.join(able)}"
        )
    seq_len_field = next(f for f in dataclasses.fields(config) if f.name == "seq_len")
    if config.takes_images and config.seq_len != seq_len_field.default:
        raise UsageError("--seq-len: the model takes images; leave it out")
    limit = getattr(config.model_config, "num_positions", None)
    if limit is not None and config.seq_len > limit and config.steps:
        owner = f"preset {config.preset}" if config.source is None else config.source
        raise UsageError(
            f"--seq-len: expected at most {limit}, the positions of {owner}, got "
            f"{config.seq_len}"
        )


def _check_source(config: TrainConfig) -> None:
    """The checkpoint's config.json says what the model is."""
    for field in dataclasses.fields(config):
        is_of_model = field.name in ("model", "preset")
        if is_of_model and getattr(config, field.name) != field.default:
            raise UsageError(
                f"{_flag(field.name)}: --from {config.source} says which model it is; "
                "leave it out"
            )
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


_OF_THE_STORE = ("store", "csd_root", "csd", "memory_bytes", "durability", "verify")
_OF_THE_STORE += (
    "state",
    "master",
    "checkpoint_every",
    "keep_last",
    "keep_every",
    "keep_best",
    "restore",
)


def _check_memory_mode(config: TrainConfig) -> None:
    """The flags of a store say nothing where there is none."""
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
