"""Loads the training and validation data that the options name.

Invariant: the result is a function of the files' content and the options; nothing is
written, and unsuitable data is refused here.
"""

from jaxinf_models import TaskName

from jaxinf.train.data.images import ImageShape
from jaxinf.train.data.labelled import load_images
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.parts import TrainingData
from jaxinf.train.data.texts import load_texts


def load_data(
    options: DataOptions,
    *,
    task: TaskName,
    seq_len: int | None,
    most_tokens: int | None = None,
    is_pretrained: bool = False,
    num_token_types: int = 0,
    image_shape: ImageShape | None = None,
) -> TrainingData:
    """Reads all data of a run (blocks); images are decoded later.

    Args:
      image_shape: the image shape of a model that takes images.

    Raises:
      DataError: the data is empty or malformed.
      OSError: a file cannot be read.
    """
    if image_shape is not None:
        return load_images(options, image_shape)
    return load_texts(
        options,
        task=task,
        seq_len=seq_len,
        most_tokens=most_tokens,
        is_pretrained=is_pretrained,
        num_token_types=num_token_types,
    )
