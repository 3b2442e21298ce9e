"""Parts that data brings along: splits of saved datasets, folders named for them.

Invariant: what is called train is trained on, and of what is called validation, dev or
test the first that there is is held out.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.files import is_saved_dataset
from jaxinf.train.data.records import saved_splits

__all__ = ["by_split", "held_out_split", "split_folders"]

_HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test")


def by_split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """What of these to train on, and what they bring to hold out.

    Raises:
      DataError: there are splits, and none of them is for training.
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
    """What of these to evaluate on: of those with splits one, the others as they are.

    Raises:
      DataError: there are splits, and none of them is to be held out.
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
    """The splits of a saved `DatasetDict`, or of a folder with one named train.

    Raises:
      DataError: a saved one lists splits that are not there.
    """
    if not path.is_dir() or is_saved_dataset(path):
        return saved_splits(path)
    if not (path / "train").is_dir():
        return {}
    names = ("train", *_HELD_OUT_SPLITS)
    return {name: path / name for name in names if (path / name).is_dir()}
