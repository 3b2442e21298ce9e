"""Refusals of run configurations that are invalid, or contradict themselves.

Invariant: no combination of fields is ignored in silence.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from jaxinf_models import MODELS, ModelFiles, TaskName, abstract_params

from jaxinf.command_line import UsageError, expand_home, flags_of
from jaxinf.csd import parse_csd
from jaxinf.errors import ExchangeError
from jaxinf.exchange import ObjectStore
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import field_map
from jaxinf.train.data.options import DataOptions
from jaxinf.train.freezing import check_frozen
from jaxinf.train.lora import check_lora

_AT_LEAST = {
    **dict.fromkeys(("batch_size", "memory", "device_memory", "micro_batches"), 1),
    **dict.fromkeys(("warmup_steps", "clip_norm", "seed", "eval_every"), 0),
    **dict.fromkeys(("checkpoint_every", "sample_bytes"), 0),
    "seq_len": 2,
}
_OF_THE_STORE = "store elastic csd-root csd memory durability state ema"
_OF_THE_STORE += " checkpoint-every export-to restore"
_OF_STREAMING = "device-memory policy replan device-updates"
ONLY_IN: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_OF_THE_STORE.split(), ("update", "stream")),
    **dict.fromkeys(_OF_STREAMING.split(), ("stream",)),
    "remat": ("update", "memory"),
}
"""Flags that some modes do not have."""


def check(config: TrainConfig) -> TrainConfig:
    """Refuses a config with invalid or contradictory fields; reads the model's files.

    Returns:
      The config with its `files`.

    Raises:
      UsageError: names the flag, the value found and the remedy.
      ExchangeError: the files of --from or --model-config cannot be read.
    """
    for flag in flags_of(TrainConfig):
        value = getattr(config, flag.field.name)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                expand_home(path, f"--{flag.name}")
    _refuse_first(_of_numbers(config))
    _refuse_first(_of_model_source(config))
    if config.source is not None:
        files = ModelFiles.of_folder(config.source)
        config = dataclasses.replace(config, files=files)
    elif config.model_file is not None:
        files = ModelFiles.of_config(config.model_file)
        config = dataclasses.replace(config, files=files)
    _refuse_first(_of_model(config))
    check_data(config, config.task_name, takes_images=config.takes_images)
    _check_trained(config)
    _ = config.average  # refuses an --ema that does not parse
    _refuse_first(_of_store(config))
    return config


def check_data(
    options: DataOptions, task: TaskName, *, takes_images: bool = False
) -> None:
    """Refuses invalid or contradictory options of data.

    Args:
      takes_images: whether the model takes images instead of text.

    Raises:
      UsageError: names the flag, the value found and the remedy.
    """
    _refuse_first(_of_data(options, task, takes_images=takes_images))


def _refuse_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise UsageError(problem)


def _of_numbers(config: TrainConfig) -> Iterator[str]:
    least_steps, also = (1, "; 0 imports what --from names")
    if config.source is not None:
        least_steps, also = 0, ""
    if config.steps < least_steps:
        yield f"--steps: expected at least {least_steps}, got {config.steps}{also}"
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            yield f"{_flag(name)}: expected at least {least}, got {value}"
    if (num_tokens := config.batch_size * (config.seq_len or 1)) >= 1 << 31:
        yield (
            "--batch-size, --seq-len: expected fewer than 2**31 tokens in a batch, got "
            f"{num_tokens}"
        )
    if config.mode != "stream" and config.batch_size % config.micro_batches:
        yield (
            f"--micro-batches: expected a divisor of the --batch-size "
            f"{config.batch_size}, got {config.micro_batches}"
        )
    if config.seed >= 1 << 32:
        yield f"--seed: expected less than 2**32, got {config.seed}"
    if config.epochs is not None:
        if not 0 < config.epochs < math.inf:
            yield f"--epochs: expected more than 0, got {config.epochs}"
        why = "--epochs says how long the run is; leave it out"
        yield from _given(config, ("steps",), why)
    if config.eval_only:
        why = "--eval-only changes no run; leave it out"
        yield from _given(config, ("restore", "elastic"), why)
        if config.mode == "memory" and config.source is None:
            yield "--eval-only: expected --from with --mode memory"
    if config.lora is None:
        yield from _given(config, ("lora_alpha",), "expected with --lora; leave it out")
    if not 0 < config.lora_alpha < math.inf:
        yield (
            f"--lora-alpha: expected a finite number above 0, got {config.lora_alpha}"
        )
    if config.learning_rate is not None and not 0 < config.learning_rate < math.inf:
        yield (
            f"--learning-rate: expected more than 0, and finite, got "
            f"{config.learning_rate}"
        )


def _of_model_source(config: TrainConfig) -> Iterator[str]:
    """Flags that contradict the config.json of --from or --model-config; presets."""
    if config.source is None and config.model_file is None:
        presets = MODELS[config.model].presets
        if config.preset not in presets:
            yield (
                f"--preset: expected one of {config.model}'s, {', '.join(presets)}, "
                f"got {config.preset}"
            )
        return
    given, others = f"--model-config {config.model_file}", ("model", "preset")
    if config.source is not None:
        given, others = f"--from {config.source}", (*others, "model_file")
    yield from _given(config, others, f"{given} says which model it is; leave it out")
    if config.mode == "memory" and not config.steps and not config.eval_only:
        yield (
            "--steps 0: --mode memory has no store to import into; leave it out, or "
            "give a --store"
        )


def _of_model(config: TrainConfig) -> Iterator[str]:
    tasks = config.family.tasks
    if config.task_name not in tasks:
        able = [name for name, m in MODELS.items() if config.task_name in m.tasks]
        yield (
            f"--task {config.task_name}: expected one of {config.family.name}'s, "
            f"{', '.join(tasks)}; --model with that task: {', '.join(able)}"
        )
    if config.seq_len is None:
        return
    if config.takes_images:
        yield "--seq-len: the model takes images; leave it out"
    limit = getattr(config.model_config, "num_positions", None)
    if limit is not None and config.seq_len > limit and config.steps:
        owner = config.source or config.model_file or f"preset {config.preset}"
        yield (
            f"--seq-len: expected at most {limit}, the positions of {owner}, got "
            f"{config.seq_len}"
        )


def _of_data(
    options: DataOptions, task: TaskName, *, takes_images: bool
) -> Iterator[str]:
    shares = {"validation": options.held_out_share, "mask-rate": options.mask_rate}
    for name, share in shares.items():
        if share is not None and not 0 < share < 1:
            yield f"--{name}: expected more than 0, less than 1, got {share}"
    try:
        field_map(options.fields)
    except DataError as error:
        yield str(error)
    if task != "masked-lm":
        why = f"--task {task} hides no tokens; leave it out"
        yield from _given(options, ("mask_rate",), why)
    if task != "causal-lm":
        why = f"--task {task} learns no prompts; leave it out"
        yield from _given(options, ("loss_on",), why)
    if takes_images:
        why = "the model takes images; leave it out"
        yield from _given(options, ("tokenizer", "fields"), why)


def _check_trained(config: TrainConfig) -> None:
    """Refuses patterns of --freeze and --lora that leave nothing, or match nothing."""
    if not config.freeze and config.adapters is None:
        return
    _, params = abstract_params(config.model_config)
    check_frozen(config.freeze, params, config.model_name)
    if config.adapters is not None and config.freeze:
        raise UsageError(
            f"--freeze {' '.join(config.freeze)}: --lora leaves all of the model as it "
            "is; leave --freeze out"
        )
    if config.adapters is not None:
        check_lora(config.adapters, params, config.model_name)


def _of_store(config: TrainConfig) -> Iterator[str]:
    """Flags of a store, of streaming, of exports and of several processes."""
    mode, compression = config.mode, config.compression
    if compression is not None and compression.error_feedback:
        if mode == "stream" and config.clip_norm:
            yield (
                f"--compress {config.compress}: with --mode stream the global norm "
                "would miss what error feedback adds; give --clip-norm 0, or leave "
                "error feedback out"
            )
        if mode != "memory" and config.durability not in ("step", 1):
            yield (
                f"--compress {config.compress}: each step commits its error feedback, "
                f"expected --durability step, got {config.durability}; leave error "
                "feedback out, or commit each step"
            )
    if mode == "stream":
        yield from _of_streaming(config)
    else:
        why = f"--mode {mode} does not have it; leave it out, or give --mode stream"
        yield from _given(config, _OF_STREAMING.replace("-", "_").split(), why)
    if config.export_to is not None:
        if config.distributed:
            yield (
                "--export-to: a run of several processes exports nothing beside "
                "training; leave it out, and export its checkpoints: jaxinf "
                f"checkpoint export {config.store} URL --checkpoint NAME"
            )
        if not config.checkpoint_every:
            yield (
                "--export-to: expected --checkpoint-every K, whose steps are exported; "
                "give that, or leave it out"
            )
        try:
            ObjectStore(config.export_to)
        except ExchangeError as error:
            yield f"--export-to: {error}"
    if config.fsdp and not config.distributed:
        yield "--fsdp: expected with --distributed; add that"
    if config.distributed and not config.steps:
        yield "--distributed: --steps 0 runs in one process; leave --distributed out"
    if config.distributed and config.policy not in ("recompute", "keep"):
        yield (
            f"--policy {config.policy}: not supported yet with --distributed; give "
            "--policy recompute or keep"
        )
    try:
        parse_csd(config.csd)
    except ValueError as error:
        yield f"--csd: {error}"
    if mode == "memory":
        why = "--mode memory keeps nothing on drives; leave it out, or give --mode "
        names = _OF_THE_STORE.replace("-", "_").split()
        yield from _given(config, names, f"{why}update")
    elif config.store is None:
        yield (
            "--store: expected a directory for the optimizer's state, got nothing; "
            "name one (it may be new), or give --mode memory to train without"
        )
    elif config.logs.is_relative_to(config.store.expanduser().absolute()):
        yield (
            f"--log-dir {config.logs}: expected a place outside the store "
            f"{config.store}, which holds nothing but the store's own files"
        )


def _of_streaming(config: TrainConfig) -> Iterator[str]:
    yield from _given(config, ("remat",), "--policy recompute, the default, does that")
    if config.memory is None:
        yield (
            "--memory: expected the bytes of host memory that a step may take, such as "
            "4GiB, got nothing; --mode stream needs it"
        )
    if not config.steps:
        yield (
            "--steps 0: imports in --mode update; go on with --mode stream and the "
            "same --store"
        )


def _given(config: DataOptions, names: Collection[str], why: str) -> Iterator[str]:
    """Yields a refusal for each field that has another value than the default."""
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            yield f"{_flag(field.name.replace('_file', '_config'))}: {why}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
