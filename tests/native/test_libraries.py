"""The cache of compiled libraries: complete or made again, also with other makers."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxinf.native import libraries, toolchain

COMPILER = toolchain.find_compiler()
SOURCE = """
#ifndef JAXINF_ENTRY
#define JAXINF_ENTRY jaxinf_entry
#endif
extern "C" __attribute__((visibility("default"))) int JAXINF_ENTRY() { return 42; }
"""
LOAD = """
import sys
from jaxinf.native import libraries
print(libraries.load_function(*sys.argv[1:])())
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads `SOURCE` by a compiler that counts its runs, with a cache of its own."""
    log, script = tmp_path / "runs", tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho run >> {log}\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("JAXINF_CACHE_DIR", str(tmp_path / "cache"))

    class Load:
        arguments = (SOURCE, toolchain.levels()[0], str(script))

        def __call__(self):
            return libraries.load_function(*self.arguments)

        def runs(self):
            return len(log.read_text().split()) if log.exists() else 0

    return Load()


def cached(tmp_path):
    return list((tmp_path / "cache" / "kernels").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("damage", ["none", "empty", "cut", "changed"])
def test_a_damaged_library_is_compiled_again(load, tmp_path, damage, run_python):
    assert load()() == 42
    (library,) = cached(tmp_path)
    content = library.read_bytes()
    library.unlink()  # this process has it open
    half = len(content) // 2
    changed = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    left = {"none": content, "empty": b"", "cut": content[:half], "changed": changed}
    library.write_bytes(left[damage])
    assert run_python(LOAD, *load.arguments).stdout == "42\n"
    assert load.runs() == (1 if damage == "none" else 2)
    assert len(library.read_bytes()) == len(content)


def test_concurrent_compilations_leave_one_library(load, tmp_path):
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(load) for _ in range(4)]
    assert [one.result()() for one in made] == [42] * 4
    assert len(cached(tmp_path)) == 1
    assert 1 <= load.runs() <= 4


def put_other(library, how, monkeypatch):
    """Replaces a library by a file that another user could have made."""
    content = library.read_bytes()
    aside = library.with_name("aside")
    library.rename(aside)
    match how:
        case "symlink":
            library.symlink_to(aside)
        case "fifo":
            os.mkfifo(library)
        case "writable":
            library.write_bytes(content)
            library.chmod(0o722)
        case "owner":
            library.write_bytes(content)
            lstat = os.lstat
            fake = SimpleNamespace(
                st_uid=os.geteuid() + 1, st_mode=stat.S_IFREG | 0o700
            )
            monkeypatch.setattr(
                "os.lstat",
                lambda p, **more: fake if Path(p) == library else lstat(p, **more),
            )


@pytest.mark.parametrize("how", ["symlink", "fifo", "writable", "owner"])
def test_a_library_that_another_could_have_put_there(
    load, tmp_path, how, monkeypatch, caplog
):
    load()
    (library,) = cached(tmp_path)
    put_other(library, how, monkeypatch)
    path = libraries.cached_library(
        library.stem, lambda path: path.write_bytes(b"compiled anew")
    )
    assert path == library
    assert path.read_bytes().startswith(b"compiled anew")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    (record,) = caplog.records
    assert str(library) in record.getMessage()
    assert record.getMessage().endswith("it is compiled again")


def test_what_is_loaded_is_what_was_checked(load, tmp_path):
    load()
    (library,) = cached(tmp_path)
    other = library.with_name("link.so")
    other.symlink_to(library)
    with pytest.raises(OSError, match="link"):
        libraries.load_library(other)
    library.chmod(0o777)
    with pytest.raises(OSError, match=r"nobody else can write, found uid .* mode 777"):
        libraries.load_library(library)


@pytest.mark.parametrize("what", ["file", "writable by others"])
def test_a_cache_that_cannot_be_used(load, tmp_path, monkeypatch, what):
    directory, said = tmp_path / "cache" / "kernels", "nobody else can write"
    if what == "file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("JAXINF_CACHE_DIR", str(tmp_path / "file"))
        said = "Not a directory"
    else:
        directory.mkdir(parents=True)
        directory.chmod(0o777)
    with pytest.raises(OSError, match=rf"{said}.*; mend .* variable JAXINF_CACHE_DIR"):
        load()
    assert load.runs() == 0
