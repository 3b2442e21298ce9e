"""From options to what a run learns from.

Invariant: it is a function of the files' content and of the options; nothing is
written, and what cannot be trained on is refused here.
"""

from jaxinf_models import TaskName

from jaxinf.train.data.images import ImageShape
from jaxinf.train.data.labelled import load_images
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.parts import TrainingData
from jaxinf.train.data.texts import load_texts

__all__ = ["TrainingData", "load_data"]


def load_data(
    options: DataOptions,
    *,
    task: TaskName,
    seq_len: int,
    image_shape: ImageShape | None = None,
) -> TrainingData:
    """Reads everything that a run learns from (blocks); images are decoded later.

    Args:
      options: what the user says.
      task: what the rows are for.
      seq_len: tokens in a row.
      image_shape: of a model that takes images.

    Raises:
      DataError: there is nothing to train on, or something malformed.
      OSError: a file cannot be read.
    """
    if image_shape is not None:
        return load_images(options, image_shape)
    return load_texts(options, task=task, seq_len=seq_len)
