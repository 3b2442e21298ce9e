"""A migration may be interrupted anywhere; the next one continues it."""

import os
import shutil
from pathlib import Path

import pytest
from golden_stores import golden, same_files

import jaxinf
from jaxinf.errors import StoreFormatError, StoreLockedError
from jaxinf.store import StoreLock, Verifier, migrate
from jaxinf.store.directory import StoreDirectory


class Cut(BaseException):
    """Represents the end of the process."""


@pytest.fixture
def cut(monkeypatch):
    """Ends a process before or after one of its changes to the file system."""

    def install(number, *, after):
        count = 0

        def wrap(change):
            def call(*arguments, **options):
                nonlocal count
                count += 1
                if count == number and not after:
                    raise Cut
                result = change(*arguments, **options)
                if count == number:
                    raise Cut
                return result

            return call

        for name in ("replace", "fsync", "unlink"):
            monkeypatch.setattr(os, name, wrap(getattr(os, name)))

    yield install
    monkeypatch.undo()


def cut_short(path, install, number, *, after):
    """Interrupts a migration; returns whether it had so many changes."""
    install(number, after=after)
    try:
        migrate(path)
    except Cut:
        return True
    return False


@pytest.mark.parametrize("name", ["store", "scalars"])
@pytest.mark.parametrize("after", [False, True])
def test_cut_at_every_change(tmp_path, monkeypatch, cut, name, after):
    number = 0
    while True:
        number += 1
        path = shutil.copytree(golden(name, 2), tmp_path / f"{number}", symlinks=True)
        was_cut = cut_short(path, cut, number, after=after)
        monkeypatch.undo()
        if not was_cut:
            break
        if "2" in (path / "jaxinf.json").read_text()[:60]:
            with pytest.raises(StoreFormatError, match="jaxinf store migrate"):
                jaxinf.open_store(path)
            assert migrate(path)
        for temporary in path.rglob(".*.tmp"):
            temporary.unlink()
        same_files(path, golden(name))
        shutil.rmtree(path)
    assert number > 12  # three records and two manifests, each with its barriers


def test_a_migrated_store_is_whole(tmp_path):
    path = shutil.copytree(golden("scalars", 2), tmp_path / "store", symlinks=True)
    assert migrate(path)
    verifier = Verifier(StoreDirectory.open(path))
    assert verifier.verify(path / "current") == []
    assert verifier.verify(path / "checkpoints" / "2") == []
    with jaxinf.open_store(path, restore="2") as store:
        assert store.step == 2


def test_an_open_store_is_not_migrated(tmp_path):
    path = shutil.copytree(golden("store", 2), tmp_path / "store", symlinks=True)
    lock = StoreLock(path)
    with pytest.raises(StoreLockedError):
        migrate(path)
    lock.release()


@pytest.mark.parametrize("version", [1, 99])
def test_versions_that_are_not_known(tmp_path, version):
    path = shutil.copytree(golden("store", 2), tmp_path / "store", symlinks=True)
    file = path / "jaxinf.json"
    text = file.read_text().replace(
        '"format_version": 2', f'"format_version": {version}'
    )
    file.write_text(text)
    with pytest.raises(StoreFormatError, match=f"the store has {version};"):
        migrate(path)


def test_no_store(tmp_path):
    with pytest.raises(StoreFormatError, match="expected a jaxinf store, found no"):
        migrate(tmp_path)


def test_a_store_that_never_committed(tmp_path):
    path = shutil.copytree(golden("store", 2), tmp_path / "store", symlinks=True)
    (path / "current").unlink()
    with pytest.raises(StoreFormatError, match="found none: the store was never"):
        migrate(path)
    assert '"format_version": 2' in (Path(path) / "jaxinf.json").read_text()
