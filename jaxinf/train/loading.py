"""Loads the data of a run and fits data and model to each other.

Invariant: data that the model cannot learn from is refused before a store is made.
"""

import dataclasses
from collections.abc import Sequence

import jax

from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.images import load_images
from jaxinf.train.data.loader import Batch, endless_batches
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.data.texts import load_texts
from jaxinf.train.data.tokenizer import find_tokenizer

_DEFAULT_SEQ_LEN = 64


def load_data(config: TrainConfig) -> tuple[TrainConfig, TrainingData]:
    """Reads a run's data; blocks.

    The returned config has its number of classes, tokenizer and length of rows.
    """
    model = config.model_config
    try:
        num_ids = getattr(model, "vocab_size", None)
        if config.tokenizer is None and config.source is not None and num_ids:
            tokenizer = find_tokenizer(config.source, num_ids)
            config = dataclasses.replace(config, tokenizer=tokenizer)
        if size := getattr(model, "image_size", None):
            shape = size, size, getattr(model, "num_channels", 3)
            data = load_images(config, shape)
        else:
            limit, seq_len = getattr(model, "num_positions", None), config.seq_len
            if seq_len is None and config.source is None:
                seq_len = min(_DEFAULT_SEQ_LEN, limit or _DEFAULT_SEQ_LEN)
            data = load_texts(
                config,
                task=config.task_name,
                seq_len=seq_len,
                max_tokens=limit,
                num_types=getattr(model, "num_token_types", 0),
            )
        for rows in (data.train, data.validation):
            rows[0]  # decodes the first image, which may not suit the model
    except DataError as error:
        raise UsageError(str(error)) from error
    _check_vocabulary(config, data)
    if data.num_labels is not None:
        config = dataclasses.replace(config, num_labels=data.num_labels)
    return dataclasses.replace(config, seq_len=data.seq_len or None), data


def make_batches(config: TrainConfig, data: TrainingData) -> Sequence[Batch]:
    """Makes the run's batches, or this process's even share of them."""
    num_shares = jax.device_count() if config.distributed is not None else 1
    num_parts = config.micro_batches if config.mode != "stream" else 1
    if config.batch_size % (num_shares * num_parts):
        parts = f" x {num_parts} micro-batches" if num_parts > 1 else ""
        raise UsageError(
            f"--batch-size: expected a multiple of the {num_shares} JAX devices"
            f"{parts}, got {config.batch_size}"
        )
    return endless_batches(
        data.train,
        batch_size=config.batch_size,
        seed=config.seed,
        row_map=data.row_map,
        shard=(jax.process_index(), jax.process_count()),
    )


def _check_vocabulary(config: TrainConfig, data: TrainingData) -> None:
    num_rows = getattr(config.model_config, "vocab_size", None)
    if data.tokenizer is None or num_rows is None:
        return
    max_id = data.tokenizer.vocab_size - 1
    if config.task_name == "masked-lm" and data.tokenizer.mask is not None:
        max_id = max(max_id, data.tokenizer.mask)
    if config.task_name == "seq2seq":
        max_id = max(max_id, data.tokenizer.start)
    if max_id >= num_rows:
        raise UsageError(
            f"--tokenizer {data.tokenizer.name}: expected ids below {num_rows}, the "
            f"rows of the embedding of {config.model_name}, found ids up to "
            f"{max_id}; give the tokenizer that the model was made with"
            f"{', or a larger model' if config.source is None else ''}"
        )
