"""The manifest of an export to a URL: its step, and the checksum of each object.

      export-begun.json ─► chunks ─► documents ─► export.json

Invariant: `MANIFEST` is written when every other object has been read back, so an
  export is complete if it is there and all that it lists is as it says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from jaxinf.documents import Document, DocumentError, convert, parse_json, shown
from jaxinf.errors import ExchangeError, StoreFormatError
from jaxinf.exchange.object_store import ObjectStore, is_url
from jaxinf.store import Id, Manifest, Sum, check_seal, seal

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


_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]


class ExportManifest(Document, frozen=True):
    """What an export has.

    Attributes:
      commit: CRC-32C of the step's ``commit.json``.
      objects: bytes and CRC-32C of each object by name, but for the two of the export
        itself.
    """

    format: Literal["jaxinf export"]
    format_version: Literal[1]
    store_id: Id
    step: _Count
    commit: Sum
    objects: dict[Annotated[str, Meta(max_length=4096)], tuple[_Count, Sum]]

    @classmethod
    def of(cls, manifest: Manifest, step: int, commit: int) -> "ExportManifest":
        """Makes the manifest of a step's export, without objects."""
        own = (manifest.store_id, step, f"{commit:08x}")
        return cls("jaxinf export", _VERSION, *own, objects={})

    def listing(self, objects: Mapping[str, tuple[int, int]]) -> "ExportManifest":
        """Returns the same with objects; their CRC-32C are numbers."""
        listed = {n: (b, f"{crc:08x}") for n, (b, crc) in objects.items()}
        return msgspec.structs.replace(self, objects=listed)

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
            del document["crc32c"]
            return convert(document, cls)
        except (DocumentError, StoreFormatError) as error:
            raise ExchangeError(
                f"{where}: expected {_WHAT}, found one that is torn or of another "
                f"tool ({error}); {_REMEDY}"
            ) from error


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
