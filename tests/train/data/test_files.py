"""The files that a user means by a name, a directory, a glob."""

import gzip

import pytest

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.files import find_files


@pytest.fixture
def tree(tmp_path):
    """A directory with text, binary, empty and hidden files."""
    (tmp_path / "a.txt").write_text("first text\n")
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "b.py").write_text("print('b')\n")
    (tmp_path / "sub" / "deep" / "c.py").write_text("print('c')\n")
    (tmp_path / "sub" / "binary.dat").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden\n")
    (tmp_path / ".hidden").write_text("hidden\n")
    return tmp_path.resolve()


def names(root, files):
    return [str(file.relative_to(root)) for file in files]


def test_directory_gives_text_files_and_names_what_is_left_out(tree):
    (tree / "d.gz").write_bytes(gzip.compress(b"text"))
    for name in ("rows.CSV", "rows.json", "rows.arrow"):
        (tree / name).write_text("text")
    (tree / "e.TXT").write_text("text", encoding="utf-16")
    (tree / "f.jsonl").write_text("{}", encoding="utf-16")
    files, left_out = find_files([str(tree)])
    assert names(tree, files) == ["a.txt", "sub/b.py", "sub/deep/c.py"]
    found = ["d.gz", "e.TXT", "f.jsonl", "rows.CSV", "rows.arrow", "rows.json"]
    assert names(tree, left_out) == [*found, "sub/binary.dat"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["sub/binary.dat", ".hidden"], [".hidden", "sub/binary.dat"]),
        (["**/*.py"], ["sub/b.py", "sub/deep/c.py"]),
        (["sub/*"], ["sub/b.py", "sub/binary.dat"]),
        (["?.txt"], ["a.txt"]),
        (["notes[1].txt"], ["notes[1].txt"]),
    ],
)
def test_names_and_globs(tree, patterns, expected):
    (tree / "notes[1].txt").write_text("text")
    files, _ = find_files([str(tree / pattern) for pattern in patterns])
    assert names(tree, files) == expected


def test_duplicates_and_links_count_once(tree):
    (tree / "link.txt").symlink_to(tree / "a.txt")
    (tree / "dangling.txt").symlink_to(tree / "nowhere")
    patterns = [str(tree), str(tree / "a.txt"), str(tree / "sub/../a.txt")]
    assert names(tree, find_files(patterns)[0])[:2] == ["a.txt", "sub/b.py"]
    assert len(find_files(patterns)[0]) == 3


@pytest.mark.parametrize("pattern", ["nothing.txt", "**/*.rs", "void"])
def test_pattern_without_a_match_is_named(tree, pattern):
    (tree / "void").mkdir()
    with pytest.raises(DataError, match="expected a file, a directory") as e:
        find_files([str(tree), str(tree / pattern)])
    assert pattern in str(e.value)
