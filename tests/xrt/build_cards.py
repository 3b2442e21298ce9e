"""Builds an xclbin of the card kernels for these tests; prints its path.

    python tests/xrt/build_cards.py DIRECTORY

A program of its own: the table of kernels comes from JAX, which may not be in use in
the process that forks the tests.
"""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swemu.build import build_xclbin
from swemu.table import units

from jaxinf.kernels import named_card_kernel
from jaxinf.kernels.card_library import card_library

KINDS = {
    # Of the engine's tests.
    "sgd_momentum": (
        "f32_update_f32", "bf16_bf16_f32", "f32_update_f32_topk",
    ),
    # Of the contract's cases.
    "adamw": (
        "f32_update_f32", "bf16_bf16_f32", "f16_f16_int8",
        "f32_update_bf16", "f32_update_int8",
    ),
    "lion": ("f32_update_int8",),
    "adagrad": ("f32_update_f32",),
    "rmsprop": ("f32_update_int8",),
    # Of training runs.
    "adamw_clipped_schedule": ("f32_update_f32",),
    "adamw_schedule": ("f32_update_f32", "f32_update_f32_topk"),
}  # fmt: skip


def main(directory: Path) -> None:
    cards = [
        [named_card_kernel(f"jaxinf_{body}_{kind}") for kind in kinds]
        for body, kinds in KINDS.items()
    ]
    with ThreadPoolExecutor() as pool:
        libraries = list(pool.map(lambda ones: card_library(*ones), cards))
    compute_units = units(list(itertools.chain(*cards)))
    print(build_xclbin(directory.resolve(), compute_units, libraries))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
