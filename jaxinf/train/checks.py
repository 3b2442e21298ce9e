"""Refusals of run configurations that are invalid, or contradict themselves.

Invariant: no combination of fields is ignored in silence.
"""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path

from jaxinf_models import MODELS, ModelFiles, TaskName, abstract_params

from jaxinf.command_line import UsageError, expand_home, flags_of
from jaxinf.csd import parse_csd
from jaxinf.errors import ExchangeError
from jaxinf.exchange import ObjectStore
from jaxinf.streaming import check_resident
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import field_map
from jaxinf.train.data.options import DataOptions
from jaxinf.train.freezing import check_frozen
from jaxinf.train.lora import check_lora


def check(config: TrainConfig) -> TrainConfig:
    """Refuses a config with invalid or contradictory fields; reads the model's files.

    Returns:
      The config with its `files`.

    Raises:
      UsageError: names the flag, the value found and the remedy.
      ExchangeError: the files of --from or --model-config cannot be read.
    """
    _check_places(config)
    _check_ranges(config)
    config = _with_files(config)
    _check_model(config)
    check_data(config, config.task_name, takes_images=config.takes_images)
    _check_trained(config)
    _check_compression(config)
    _ = config.average  # refuses an --ema that does not parse
    _check_streaming(config)
    _check_exports(config)
    _check_processes(config)
    try:
        parse_csd(config.csd)
    except ValueError as error:
        raise UsageError(f"--csd: {error}") from error
    if config.mode == "memory":
        why = "--mode memory keeps nothing on drives; leave it out, or give --mode "
        _refuse(config, _OF_THE_STORE, f"{why}update")
    elif config.store is None:
        raise UsageError(
            "--store: expected a directory for the optimizer's state, got nothing; "
            "name one (it may be new), or give --mode memory to train without"
        )
    elif config.logs.is_relative_to(config.store.expanduser().absolute()):
        raise UsageError(
            f"--log-dir {config.logs}: expected a place outside the store "
            f"{config.store}, which holds nothing but the store's own files"
        )
    return config


def _check_trained(config: TrainConfig) -> None:
    """Refuses patterns of --freeze and --lora that leave nothing, or match nothing."""
    if not config.freeze and config.adapters is None:
        return
    _, params = abstract_params(config.model_config)
    check_frozen(config.freeze, params, config.model_name)
    if config.adapters is None:
        return
    if config.freeze:
        raise UsageError(
            f"--freeze {' '.join(config.freeze)}: --lora leaves all of the model as it "
            "is; leave --freeze out"
        )
    check_lora(config.adapters, params, config.model_name)


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


def _check_exports(config: TrainConfig) -> None:
    if config.export_to is None:
        return
    if not config.checkpoint_every:
        raise UsageError(
            "--export-to: expected --checkpoint-every K, whose steps are exported; "
            "give that, or leave it out"
        )
    try:
        ObjectStore(config.export_to)
    except ExchangeError as error:
        raise UsageError(f"--export-to: {error}") from None


def _check_places(config: TrainConfig) -> None:
    for flag in flags_of(TrainConfig):
        value = getattr(config, flag.field.name)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                expand_home(path, f"--{flag.name}")


def _check_ranges(config: TrainConfig) -> None:
    for name, least in (
        ("steps", 1 if config.source is None else 0),
        ("batch_size", 1),
        ("seq_len", 2),
        ("memory", 1),
        ("device_memory", 1),
        ("micro_batches", 1),
        ("warmup_steps", 0),
        ("clip_norm", 0),
        ("seed", 0),
        ("eval_every", 0),
        ("checkpoint_every", 0),
        ("sample_bytes", 0),
    ):
        value = getattr(config, name)
        if value is not None and not value >= least:
            also = "; 0 imports what --from names" if name == "steps" and least else ""
            raise UsageError(
                f"{_flag(name)}: expected at least {least}, got {value}{also}"
            )
    if (num_tokens := config.batch_size * (config.seq_len or 1)) >= 1 << 31:
        raise UsageError(
            "--batch-size, --seq-len: expected fewer than 2**31 tokens in a batch, got "
            f"{num_tokens}"
        )
    if config.mode != "stream" and config.batch_size % config.micro_batches:
        raise UsageError(
            f"--micro-batches: expected a divisor of the --batch-size "
            f"{config.batch_size}, got {config.micro_batches}"
        )
    if config.seed >= 1 << 32:
        raise UsageError(f"--seed: expected less than 2**32, got {config.seed}")
    if config.epochs is not None and not 0 < config.epochs < math.inf:
        raise UsageError(f"--epochs: expected more than 0, got {config.epochs}")
    if config.epochs is not None:
        _refuse(config, ("steps",), "--epochs says how long the run is; leave it out")
    if config.eval_only:
        _refuse(config, ("restore",), "--eval-only changes no run; leave it out")
    if config.eval_only and config.mode == "memory" and config.source is None:
        raise UsageError("--eval-only: expected --from with --mode memory")
    if config.lora is None:
        _refuse(config, ("lora_alpha",), "expected with --lora; leave it out")
    if not 0 < config.lora_alpha < math.inf:
        raise UsageError(
            f"--lora-alpha: expected a finite number above 0, got {config.lora_alpha}"
        )
    if config.learning_rate is not None and not 0 < config.learning_rate < math.inf:
        raise UsageError(
            f"--learning-rate: expected more than 0, and finite, got "
            f"{config.learning_rate}"
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


def check_data(
    options: DataOptions, task: TaskName, *, takes_images: bool = False
) -> None:
    """Refuses invalid or contradictory options of data.

    Args:
      takes_images: whether the model takes images instead of text.

    Raises:
      UsageError: names the flag, the value found and the remedy.
    """
    for flag, share in (
        ("validation", options.held_out_share),
        ("mask-rate", options.mask_rate),
    ):
        if not 0 < share < 1:
            raise UsageError(
                f"--{flag}: expected more than 0, less than 1, got {share}"
            )
    try:
        field_map(options.fields)
    except DataError as error:
        raise UsageError(str(error)) from error
    for is_refused, names, why in (
        (task != "masked-lm", ("mask_rate",), f"--task {task} hides no tokens"),
        (task != "causal-lm", ("loss_on",), f"--task {task} learns no prompts"),
        (takes_images, ("tokenizer", "fields"), "the model takes images"),
    ):
        if is_refused:
            _refuse(options, names, f"{why}; leave it out")


def _check_source(config: TrainConfig) -> None:
    """Refuses flags that contradict the config.json of --from or --model-config."""
    given, others = f"--model-config {config.model_file}", ("model", "preset")
    if config.source is not None:
        given, others = f"--from {config.source}", (*others, "model_file")
    _refuse(config, others, f"{given} says which model it is; leave it out")
    if config.mode == "memory" and not config.steps and not config.eval_only:
        raise UsageError(
            "--steps 0: --mode memory has no store to import into; leave it out, or "
            "give a --store"
        )


_OF_THE_STORE = ("store", "elastic", "csd_root", "csd", "memory", "durability")
_OF_THE_STORE += ("state_tier", "state", "ema", "checkpoint_every", "export_to")
_OF_THE_STORE += ("restore",)
_OF_STREAMING = ("device_memory", "policy", "resident", "replan", "device_updates")


def _check_streaming(config: TrainConfig) -> None:
    """Refuses flags of --mode stream in other modes, and what it cannot do."""
    if config.mode == "stream":
        _refuse(config, ("remat",), "--policy recompute, the default, does that")
    else:
        why = f"--mode {config.mode} does not have it; leave it out, or give "
        why += "--mode stream"
        _refuse(config, _OF_STREAMING, why)
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
    if not config.steps:
        raise UsageError(
            "--steps 0: imports in --mode update; go on with --mode stream and the "
            "same --store"
        )


def _check_processes(config: TrainConfig) -> None:
    """Refuses flags of several processes in one, and modes that need one process."""
    if config.fsdp and not config.distributed:
        raise UsageError("--fsdp: expected with --distributed; add that")
    if config.distributed and not config.steps:
        raise UsageError(
            "--distributed: --steps 0 runs in one process; leave --distributed out"
        )
    if config.distributed and config.policy not in ("recompute", "keep"):
        raise UsageError(
            f"--policy {config.policy}: not supported yet with --distributed; give "
            "--policy recompute or keep"
        )


def _refuse(config: DataOptions, names: Collection[str], why: str) -> None:
    """Refuses fields that have another value than the default."""
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            name = field.name.replace("_file", "_config")
            raise UsageError(f"{_flag(name)}: {why}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
