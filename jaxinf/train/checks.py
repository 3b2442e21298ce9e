"""Refusals of run configurations that are invalid, or contradict themselves.

Invariant: no combination of fields is ignored in silence. Functions yield problems as
text, with the flag, the value found and the remedy; the first is raised. A check that
the store makes when it is opened, before anything is written, is not repeated here.
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from jaxinf_models import MODELS, ModelFiles

from jaxinf.command_line import UsageError
from jaxinf.train.config import FLAGS, TrainConfig
from jaxinf.train.freezing import check_frozen
from jaxinf.train.optimizers import check_optimizer

_Problems: TypeAlias = Iterator[str]

_NON_NEGATIVE = (
    "steps", "warmup-steps", "clip-norm", "seed", "eval-every", "checkpoint-every",
)  # fmt: skip
_POSITIVE = ("batch-size", "memory", "device-memory", "micro-batches", "durability")
_MINIMUMS: dict[str, int] = {
    **dict.fromkeys(_NON_NEGATIVE, 0),
    **dict.fromkeys(_POSITIVE, 1),
    "seq-len": 2,
}
_STORE_FLAGS = (
    "store", "elastic", "csd-root", "csd", "memory", "durability", "state", "ema",
    "checkpoint-every", "export-to",
)  # fmt: skip
_STREAMING_FLAGS = ("device-memory", "device-updates")


def check(config: TrainConfig) -> TrainConfig:
    """Refuses invalid or contradictory fields; returns the config with its `files`."""
    for problem in _value_problems(config):
        raise UsageError(problem)
    files = config.model_file and ModelFiles.of_config(config.model_file)
    files = ModelFiles.of_folder(config.source) if config.source else files
    config = dataclasses.replace(config, files=files)
    _ = config.average  # refuses an --ema that does not parse
    for problem in chain(_model_problems(config), _mode_problems(config)):
        raise UsageError(problem)
    check_optimizer(config)
    return config


def _refuse(config: TrainConfig, why: str, *names: str) -> _Problems:
    """Yields a refusal for each flag that has another value than the default."""
    for name in names:
        if getattr(config, FLAGS[name].name) != FLAGS[name].default:
            yield f"--{name}: {why}{'' if why.endswith(' or') else ';'} leave it out"


def _value_problems(config: TrainConfig) -> _Problems:
    """Yields refusals of single flags, of numbers together, and of the model's name."""
    for name, field in FLAGS.items():
        value = getattr(config, field.name)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) and os.path.expanduser(path)[:1] == "~":
                yield f"--{name} {path}: expected the home of a user, found none"
        least = _MINIMUMS.get(name)
        if least is not None and isinstance(value, int | float) and not value >= least:
            yield f"--{name}: expected at least {least}, got {value}"
        if value == math.inf:  # JSON, and so a commit, has no form for it
            yield f"--{name}: expected a finite number, got {value}"
    if config.batch_size * (config.seq_len or 1) >= 1 << 31:
        yield "--batch-size, --seq-len: expected fewer than 2**31 tokens in a batch"
    if config.seed >= 1 << 32:
        yield f"--seed: expected less than 2**32, got {config.seed}"
    if config.learning_rate is not None and not 0 < config.learning_rate < math.inf:
        yield f"--learning-rate: expected more than 0, got {config.learning_rate}"
    share = config.held_out_share
    if share is not None and not 0 < share < 1:
        yield f"--validation: expected more than 0, less than 1, got {share}"
    presets, why = MODELS[config.model].presets, "says which model it is"
    if config.source is not None:
        yield from _refuse(config, f"--from {config.source} {why}", "model", "preset")
    elif config.model_file is not None:
        yield from _refuse(config, f"--preset {config.model_file} {why}", "model")
    elif config.preset not in presets:
        owners = [name for name, m in MODELS.items() if config.preset in m.presets]
        yield (
            f"--preset: expected one of {config.model}'s, {', '.join(presets)}, or a "
            f"FILE.json, got {config.preset}"
            f"{', which --model ' + owners[0] + ' has' if owners else ''}"
        )


def _model_problems(config: TrainConfig) -> _Problems:
    tasks, task = config.family.tasks, config.task_name
    if task not in tasks:
        models = [name for name, m in MODELS.items() if task in m.tasks]
        yield (
            f"--task {task}: expected one of {config.family.name}'s, "
            f"{', '.join(tasks)}; --model with that task: {', '.join(models)}"
        )
    if task != "causal-lm":
        yield from _refuse(config, f"--task {task} learns no prompts", "loss-on")
    limit = getattr(config.model_config, "num_positions", None)
    if config.takes_images:
        yield from _refuse(config, "the model takes images", "seq-len", "tokenizer")
    elif limit is not None and (config.seq_len or 0) > limit:
        owner = config.source or config.model_file or f"preset {config.preset}"
        yield (
            f"--seq-len: expected at most {limit}, the positions of {owner}, got "
            f"{config.seq_len}"
        )
    if config.adapters is not None and config.freeze:
        yield (
            f"--freeze {' '.join(config.freeze)}: --lora leaves all of the model as it "
            "is; leave --freeze out"
        )
    if config.freeze or config.lora:
        _, params = config.abstract  # refuses a pattern of --lora without a matrix
        check_frozen(config.freeze, params, config.model_name)


def _mode_problems(config: TrainConfig) -> _Problems:
    mode = config.mode
    if mode == "memory":
        why = "--mode memory keeps nothing on drives; give --mode update, or"
        yield from _refuse(config, why, *_STORE_FLAGS, "distributed")
    elif config.store is None:
        yield (
            "--store: expected a directory for the optimizer's state, got nothing; "
            "name one (it may be new), or give --mode memory to train without"
        )
    if mode != "stream":
        why = f"--mode {mode} does not have it; give --mode stream, or"
        yield from _refuse(config, why, *_STREAMING_FLAGS)
        if config.policy not in (None, "recompute", "keep"):
            yield f"--policy {config.policy}: {why} leave it out"
    elif config.memory is None:
        yield (
            "--memory: expected the bytes of host memory that a step may take, such as "
            "4GiB, got nothing; --mode stream needs it"
        )
    compression = config.compression
    has_feedback = compression is not None and compression.error_feedback
    if has_feedback and mode == "stream" and config.clip_norm:
        yield (
            f"--compress {config.compress}: with --mode stream the global norm would "
            "miss what error feedback adds; give --clip-norm 0, or leave error "
            "feedback out"
        )
    if config.distributed is None:
        yield from _refuse(config, "expected with --distributed; add that, or", "fsdp")
    if config.export_to is not None and not config.checkpoint_every:
        yield (
            "--export-to: expected --checkpoint-every K, whose steps are exported; "
            "give that, or leave it out"
        )
    store = config.store and config.store.expanduser().absolute()
    if store is not None and config.logs.is_relative_to(store):
        yield (
            f"--log-dir {config.logs}: expected a place outside the store "
            f"{config.store}, which holds nothing but the store's own files"
        )
