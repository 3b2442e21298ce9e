"""Measures the drives of a store, and deals its chunks by their speed.

Invariant: nothing is left on a drive, and no bit of a store depends on the result.
"""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.csd import Csd, CsdSpec, Extent, Transfer, open_csds
from jaxinf.engine.options import StoreOptions
from jaxinf.io import ByteMeters, allocate_file, fsync_file
from jaxinf.io.failures import translated
from jaxinf.store import Manifest, csd_bytes, deal_by_shares, is_dealt_by

__all__ = ["deal_new_store", "measure_csds", "shares_of", "tell_shares"]

_LOG = logging.getLogger("jaxinf")

_BLOCK_BYTES = 4 << 20
_NUM_BLOCKS = 16
_LEAST_BYTES = 256 << 20
"""Bytes of a slot on each drive from which on its speed is measured."""

_ALIKE = 1.25
"""Drives whose speeds are within this ratio get equal shares."""


def measure_csds(csd: CsdSpec, roots: Sequence[Path]) -> list[float]:
    """Writes 64 MiB to each drive and reads them, all drives at once; blocks.

    Args:
      csd: the kind of the CSDs; the limits of its drives count.
      roots: a directory on each.

    Returns:
      Bytes a second of each.

    Raises:
      StoreError: a drive is full, or failed.
    """
    # Cards are not needed to know a drive, and may be in use.
    spec = CsdSpec("host", csd.rates.of_drives)
    fleet = open_csds(
        spec, roots, memory_bytes=len(roots) * _BLOCK_BYTES, meters=ByteMeters()
    )
    with contextlib.ExitStack() as stack:
        stack.callback(fleet.close)
        folders = []
        for root in roots:
            with translated("measuring its speed", root):
                made = tempfile.TemporaryDirectory(prefix=".jaxinf-", dir=root)
                folders.append(Path(stack.enter_context(made)))
        csds = fleet.attach(folders, _BLOCK_BYTES, _BLOCK_BYTES)
        pool = stack.enter_context(ThreadPoolExecutor(len(roots)))
        return list(pool.map(_measure, csds, folders))


def _measure(csd: Csd, folder: Path) -> float:
    file, num_bytes = folder / "data", _NUM_BLOCKS * _BLOCK_BYTES
    with translated("measuring its speed", folder):
        allocate_file(file, num_bytes, num_bytes)
        buffer = csd.acquire(_BLOCK_BYTES)
        assert buffer is not None, "each drive has a block of the memory"
        whole = Extent(np.dtype(np.uint8), _BLOCK_BYTES, 0, 0)
        content = np.random.default_rng(0).bytes(_BLOCK_BYTES)
        csd.put(buffer, whole, np.frombuffer(content, np.uint8))
        began_s = time.perf_counter()
        for move in (csd.write, csd.read):
            for number in range(_NUM_BLOCKS):
                part = replace(whole, file_offset_bytes=number * _BLOCK_BYTES)
                move([Transfer(buffer, part, file)])
            if move == csd.write:
                fsync_file(file)
        buffer.release()
        return 2 * num_bytes / (time.perf_counter() - began_s)


def shares_of(rates: Sequence[float]) -> tuple[float, ...]:
    """Returns shares by speed: the slowest has 1; all have 1 if they are alike."""
    slowest = min(rates)
    if max(rates) <= _ALIKE * slowest:
        return (1.0,) * len(rates)
    return tuple(round(rate / slowest, 2) for rate in rates)


def deal_new_store(options: StoreOptions, manifest: Manifest) -> Manifest:
    """Deals the chunks of a new store by its drives' shares, if these are unequal.

    Raises:
      StoreError: as `measure_csds`.
    """
    roots = [Path(root) for root in manifest.csds]
    shares = options.csd_shares
    if not shares and _is_worth_measuring(options, manifest, roots):
        rates = measure_csds(options.csd, roots)
        shares = shares_of(rates)
        shown = ", ".join(
            f"{rate / 1e6:.0f} MB/s on {root} (share {share:g})"
            for root, rate, share in zip(roots, rates, shares, strict=True)
        )
        _LOG.info("%s: the drives were measured: %s", options.path, shown)
    if len(set(shares)) < 2:
        return manifest
    status = [os.statvfs(root) for root in roots]
    num_copies = 2 + options.num_kept
    room = [one.f_bavail * one.f_frsize // num_copies for one in status]
    return deal_by_shares(manifest, shares, room)


def _is_worth_measuring(
    options: StoreOptions, manifest: Manifest, roots: Sequence[Path]
) -> bool:
    if len(roots) < 2 or sum(csd_bytes(manifest)) < len(roots) * _LEAST_BYTES:
        return False
    are_drives = len({root.stat().st_dev for root in roots}) == len(roots)
    return are_drives or bool(options.csd.rates.drives)


def tell_shares(options: StoreOptions, manifest: Manifest) -> None:
    """Warns if a store's chunks are not dealt as its options ask for."""
    shares = options.csd_shares
    if not shares or is_dealt_by(manifest, shares):
        return
    found = csd_bytes(manifest)
    _LOG.warning(
        "%s: csds= asks for shares of %s, and the drives have %s bytes of its chunks; "
        "only a new store is dealt by csds=. To move chunks: jaxinf store rebalance "
        "--by-speed",
        options.path,
        " : ".join(f"{share:g}" for share in shares),
        " : ".join(map(str, found)),
    )
