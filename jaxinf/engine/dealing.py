"""Deals the chunks of a store by the shares that its user gives its drives.

Invariant: no bit of a store depends on the shares.
"""

import logging
import os

from jaxinf.engine.options import StoreOptions
from jaxinf.store import Manifest, csd_bytes, deal, is_dealt_by

_LOG = logging.getLogger("jaxinf")


def deal_new_store(options: StoreOptions, manifest: Manifest) -> Manifest:
    """Deals the chunks of a new store by its drives' shares, if these are unequal."""
    shares = options.csd_shares
    if len(set(shares)) < 2:
        return manifest
    status = [os.statvfs(root) for root in manifest.csds]
    num_copies = 2 + options.retention.most
    room = [one.f_bavail * one.f_frsize // num_copies for one in status]
    return deal(manifest, shares=shares, room=room)


def tell_shares(options: StoreOptions, manifest: Manifest) -> None:
    """Warns if a store's chunks are not dealt as its options ask for."""
    shares = options.csd_shares
    if not shares or is_dealt_by(manifest, shares):
        return
    found = csd_bytes(manifest)
    _LOG.warning(
        "%s: csds= asks for shares of %s, and the drives have %s bytes of its chunks; "
        "only a new store is dealt by csds=. To move chunks: jaxinf store copy, "
        "with --csd-root and --share for each drive",
        options.path,
        " : ".join(f"{share:g}" for share in shares),
        " : ".join(map(str, found)),
    )
