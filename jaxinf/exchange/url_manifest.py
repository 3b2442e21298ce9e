"""The manifest of an export to a URL: its step, and the checksum of each object.

      export-begun.json ─► chunks ─► documents ─► export.json

Invariant: `MANIFEST` is written when every other object has been read back, so an
  export is complete if it is there and all that it lists is as it says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinf.errors import ExchangeError, StoreFormatError
from jaxinf.exchange.object_store import ObjectStore, is_url
from jaxinf.exchange.schemas import EXPORT
from jaxinf.schema import SchemaError, parse_json, shown
from jaxinf.store import check_seal, seal

BEGUN = "export-begun.json"
"""The first object: whose export lies here."""

MANIFEST = "export.json"
"""The last object."""

_VERSION = 1  # of the format, which docs/format.md describes

_PLACE = {"format": "jaxinf exports", "format_version": _VERSION}
_WHAT = "the manifest of an export"
_ROOT = "exports.json"
_REMEDY = "export to this URL again, or remove what is there"


def export_url_at(place: str) -> str | None:
    """Returns the URL of an export, given as such or as its directory, else None."""
    if is_url(place):
        return place
    directory = Path(place).expanduser().absolute()
    return f"file://{directory}" if (directory / MANIFEST).is_file() else None


@dataclass(frozen=True)
class ExportManifest:
    """What an export has.

    Attributes:
      commit: CRC-32C of the step's ``commit.json``, 8 hex digits.
      objects: bytes and CRC-32C of each object by name, but for the two of the export
        itself; not part of comparisons.
    """

    store_id: str
    step: int
    commit: str
    objects: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)

    def to_bytes(self) -> bytes:
        document: dict[str, Any] = {
            "format": "jaxinf export",
            "format_version": _VERSION,
            "store_id": self.store_id,
            "step": self.step,
            "commit": self.commit,
            "objects": {n: [b, f"{crc:08x}"] for n, (b, crc) in self.objects.items()},
        }
        return seal(document)

    @classmethod
    def read(cls, place: ObjectStore, name: str) -> "ExportManifest | None":
        """Reads `MANIFEST` or `BEGUN`; None if it is not there.

        Raises:
          ExchangeError: it is torn, or of another format.
        """
        raw = place.read(name)
        if raw is None:
            return None
        where = f"{place.where}: {name}"
        try:
            document = parse_json(raw)
            version = document.get("format_version") if _is_export(document) else None
            if type(version) is int and version > _VERSION:
                raise ExchangeError(
                    f"{where}: this jaxinf reads version {_VERSION} of exports, "
                    f"found {shown(version)}; use a newer jaxinf"
                )
            check_seal(where, raw, _WHAT, _REMEDY)
            EXPORT.check(document)
        except (SchemaError, StoreFormatError) as error:
            raise ExchangeError(
                f"{where}: expected {_WHAT}, found one that is torn or of another "
                f"tool ({error}); {_REMEDY}"
            ) from error
        objects = {n: (b, int(crc, 16)) for n, (b, crc) in document["objects"].items()}
        return cls(document["store_id"], document["step"], document["commit"], objects)


def url_of_step(url: str, step: int) -> str:
    """Returns the place of one of a run's exports, which have a URL together."""
    return f"{url.rstrip('/')}/{step}"


def check_exports(url: str, step: int) -> None:
    """Refuses a place to which a run's steps cannot be exported; blocks.

    It is written to: ``exports.json`` says what the place is.

    Args:
      url: the place.
      step: the next step to be exported.

    Raises:
      ExchangeError: it is no such URL, cannot be read or written, or has an export of
        that step.
    """
    there = ObjectStore(url_of_step(url, step))
    for name in (BEGUN, MANIFEST):
        found = ExportManifest.read(there, name)
        if found is not None:
            raise ExchangeError(
                f"{there.where}: expected nothing, as step {step} of this run is to be "
                f"exported there, found step {found.step} of store {found.store_id}; "
                "give another URL, or remove it"
            )
    ObjectStore(url).put(_ROOT, seal(_PLACE))


def _is_export(document: Any) -> bool:
    return isinstance(document, dict) and document.get("format") == "jaxinf export"
