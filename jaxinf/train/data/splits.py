"""Splits within the data: splits of saved datasets, or folders with their names.

Invariant: the split named train is for training; the first existing one of validation,
dev and test is held out.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.files import is_saved_dataset
from jaxinf.train.data.records import saved_splits

_HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test")


def by_split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Returns the paths for training, and those for validation if there are splits.

    Raises:
      DataError: there are splits, but none for training.
    """
    train: list[Path] = []
    held: list[Path] = []
    for path in paths:
        splits = split_folders(path)
        if splits and "train" not in splits:
            raise DataError(
                f"{path}: expected a split named train, found {sorted(splits)}; name "
                "the folder of one of them"
            )
        train.append(splits.get("train", path))
        held += [splits[name] for name in _HELD_OUT_SPLITS if name in splits][:1]
    return train, held


def held_out_split(paths: Sequence[Path]) -> list[Path]:
    """Returns the paths for evaluation: one split of each, or the path itself.

    Raises:
      DataError: there are splits, but none for validation.
    """
    found: list[Path] = []
    for path in paths:
        splits = split_folders(path)
        names = [name for name in _HELD_OUT_SPLITS if name in splits]
        if splits and not names:
            raise DataError(
                f"--validation {path}: expected a split named validation or test, "
                f"found {sorted(splits)}"
            )
        found.append(splits[names[0]] if names else path)
    return found


def split_folders(path: Path) -> dict[str, Path]:
    """Returns the splits of a saved `DatasetDict`, or of a folder with one named train.

    Raises:
      DataError: a `DatasetDict` lists splits that do not exist.
    """
    if not path.is_dir() or is_saved_dataset(path):
        return saved_splits(path)
    if not (path / "train").is_dir():
        return {}
    names = ("train", *_HELD_OUT_SPLITS)
    return {name: path / name for name in names if (path / name).is_dir()}
