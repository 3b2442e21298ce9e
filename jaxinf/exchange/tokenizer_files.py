"""The files of a tokenizer beside a model's weights: kept in a store, and exported.

    folder of weights ──► STORE/tokenizer/ ──► folder of an export

Invariant: only files with these names are copied, whole and without a change; none is
read by a link out of its folder.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from jaxinf.documents import MOST_BYTES
from jaxinf.exchange.sources import within
from jaxinf.transfer import read_bounded, write_bytes_atomically

_OF_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt"),
)
_OF_MODELS = ("generation_config.json", "preprocessor_config.json")
_FOLDER = "tokenizer"


def tokenizer_files(
    *, tokenizer: Path | None = None, weights: Path | None = None
) -> dict[str, bytes]:
    """Reads the files of a tokenizer, by name.

    Args:
      tokenizer: the folder, or its ``tokenizer.json``; by default that of the weights.
      weights: the folder of the weights that a run begins with.

    Raises:
      ExchangeError: a file is a link out of its folder.
      StoreIOError: a file cannot be read, or is larger than 64 MiB.
    """
    if tokenizer is not None and not tokenizer.is_dir():
        tokenizer = tokenizer.parent
    places = ((weights, _OF_MODELS), (tokenizer or weights, _OF_TOKENIZERS))
    return {
        name: read_bounded(within(folder, name), MOST_BYTES)
        for folder, names in places
        if folder is not None
        for name in names
        if (folder / name).is_file()
    }


def keep_tokenizer(store: Path, files: Mapping[str, bytes]) -> None:
    """Writes a tokenizer's files into a store, in place of those kept before; blocks.

    Raises:
      StoreSpaceError, StoreIOError: they cannot be written.
    """
    place = store / _FOLDER
    shutil.rmtree(place, ignore_errors=True)
    if files:
        place.mkdir()
    for name, content in files.items():
        write_bytes_atomically(place / name, content)


def kept_tokenizer(beside: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Returns the tokenizer among the files that a store has beside its steps."""
    names = {f"{_FOLDER}/{name}": name for name in (*_OF_TOKENIZERS, *_OF_MODELS)}
    return {names[place]: raw for place, raw in beside.items() if place in names}
