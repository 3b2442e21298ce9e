"""Params from and to other tools, and whole steps from and to directories and URLs.

Invariant: memory stays within a budget for leaves of any size, unless another tool's
file has larger chunks; everything is checked before anything is written. A faulty file
of another tool, or a place that cannot be used, raises ExchangeError.
"""

from jaxinf.exchange.huggingface_config import (
    Architecture,
    read_config_file,
    write_config,
)
from jaxinf.exchange.huggingface_folder import HuggingFaceFolder, export_huggingface
from jaxinf.exchange.params import LORA_A, LORA_B, TRANSIT_BYTES, ExportOptions
from jaxinf.exchange.safetensors_files import export_safetensors
from jaxinf.exchange.sources import (
    VOCABULARIES,
    keep_tokenizer,
    kept_tokenizer,
    read_tokenizer_files,
)
from jaxinf.exchange.url_export import (
    ObjectStore,
    check_exports,
    export_source,
    export_url,
    export_url_at,
    is_url,
    least_memory,
    url_of_step,
)
