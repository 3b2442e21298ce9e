"""The byte corpus: which files, which bytes, and batches that only a step decides."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxinf.train import data as data_module
from jaxinf.train import entropy as entropy_module
from jaxinf.train.data import ByteCorpus, find_files, standard_library_files
from jaxinf.train.entropy import bigram_entropy, unigram_entropy


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


@pytest.fixture
def corpus():
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, 256, n, np.uint8)  # noqa: E731
    return ByteCorpus(train=draw(10_000), validation=draw(500))


def names(root, files):
    return [str(file.relative_to(root)) for file in files]


def test_directory_gives_text_files(tree):
    files = find_files([str(tree)])
    assert names(tree, files) == ["a.txt", "sub/b.py", "sub/deep/c.py"]


def test_named_file_is_taken_as_it_is(tree):
    files = find_files([str(tree / "sub/binary.dat"), str(tree / ".hidden")])
    assert names(tree, files) == [".hidden", "sub/binary.dat"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.py", ["sub/b.py", "sub/deep/c.py"]),
        ("sub/*", ["sub/b.py", "sub/binary.dat"]),
        ("?.txt", ["a.txt"]),
    ],
)
def test_globs(tree, pattern, expected):
    assert names(tree, find_files([str(tree / pattern)])) == expected


def test_brackets_in_a_name_are_no_glob(tmp_path):
    file = tmp_path / "notes[1].txt"
    file.write_text("text")
    assert find_files([str(file)]) == [file.resolve()]


def test_duplicates_and_links_count_once(tree):
    (tree / "link.txt").symlink_to(tree / "a.txt")
    (tree / "dangling.txt").symlink_to(tree / "nowhere")
    patterns = [str(tree), str(tree / "a.txt"), str(tree / "sub/../a.txt")]
    assert names(tree, find_files(patterns))[:2] == ["a.txt", "sub/b.py"]
    assert len(find_files(patterns)) == 3


def test_relative_pattern(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert names(tree, find_files(["sub"])) == ["sub/b.py", "sub/deep/c.py"]


@pytest.mark.parametrize("pattern", ["nothing.txt", "**/*.rs", "void"])
def test_pattern_without_a_match_is_named(tree, pattern):
    (tree / "void").mkdir()
    with pytest.raises(FileNotFoundError, match="expected a file, a directory") as e:
        find_files([str(tree), str(tree / pattern)])
    assert pattern in str(e.value)


def test_standard_library():
    files = standard_library_files()
    assert files == sorted(set(files))
    assert {"argparse.py", "ast.py", "dataclasses.py"} <= {file.name for file in files}
    parts = {part for file in files for part in file.parts}
    assert not parts & {"site-packages", "idle_test", "__pycache__"}
    text = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    assert text.size >= 5_000_000
    # What Python source looks like, in any version.
    assert 2.8 < unigram_entropy(text) < 3.5
    assert 2.1 < bigram_entropy(text) < 2.7


def test_standard_library_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(data_module.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"found 0; name other text with --data"
    ):
        standard_library_files()


def test_load_separates_splits_and_keeps_every_byte(tree):
    files = find_files([str(tree)])
    loaded = ByteCorpus.load(files, validation_fraction=0.25)
    both = np.concatenate([loaded.train, loaded.validation])
    assert both.dtype == np.uint8
    assert sorted(bytes(both).split(b"\0")) == sorted(
        [b"", *(file.read_bytes() for file in files)]
    )
    assert loaded.validation.size == int(both.size * 0.25)


def test_load_depends_on_content_only(tree, tmp_path_factory):
    files = find_files([str(tree)])
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    moved = [elsewhere / f"{9 - i}" for i in range(len(files))]
    for old, new in zip(files, moved, strict=True):
        new.write_bytes(old.read_bytes())
    here = ByteCorpus.load(files)
    for other in (files[::-1], moved):
        there = ByteCorpus.load(other)
        np.testing.assert_array_equal(here.train, there.train)
        np.testing.assert_array_equal(here.validation, there.validation)
        assert here.fingerprint() == there.fingerprint()


def test_fingerprint_tells_content_and_split_apart(tree):
    files = find_files([str(tree)])
    before = ByteCorpus.load(files).fingerprint()
    assert len(before) == 64
    assert ByteCorpus.load(files, validation_fraction=0.5).fingerprint() != before
    files[0].write_text("First text\n")
    assert ByteCorpus.load(files).fingerprint() != before


def test_load_refusals(tree):
    with pytest.raises(ValueError, match=r"expected text, got 0 file\(s\)"):
        ByteCorpus.load([])
    with pytest.raises(ValueError, match=r"expected text, got 1 file\(s\) of 0 bytes"):
        ByteCorpus.load([tree / "empty.txt"])
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1.0"):
        ByteCorpus.load([tree / "a.txt"], validation_fraction=1.0)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_batch_is_windows_of_the_split(corpus, split):
    text = getattr(corpus, split)
    tokens, targets = corpus.batch(3, 1, batch_size=8, seq_len=64, split=split)
    assert tokens.shape == targets.shape == (8, 64)
    assert tokens.dtype == targets.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    for row, target in zip(tokens, targets, strict=True):
        window = bytes([*row.tolist(), int(target[-1])])
        assert window in text.tobytes()


def test_batch_is_a_pure_function_of_seed_and_step(corpus):
    def draw(step, seed):
        return corpus.batch(step, seed, batch_size=4, seq_len=32)[0]

    later = draw(7, 0)
    for step in range(7):
        draw(step, 0)
    np.testing.assert_array_equal(draw(7, 0), later)
    assert not np.array_equal(draw(8, 0), later)
    assert not np.array_equal(draw(7, 1), later)
    assert not np.array_equal(draw(0, 7), later)


def test_batch_golden():
    """Fixed for good: a resumed run must see the batches of the interrupted one.

    Regenerate: `ByteCorpus(text, text[:0]).batch(5, 9, batch_size=4, seq_len=1)` with
    `text = np.arange(256, dtype=np.uint8)`.
    """
    text = np.arange(256, dtype=np.uint8)
    tokens, _ = ByteCorpus(text, text[:0]).batch(5, 9, batch_size=4, seq_len=1)
    assert tokens[:, 0].tolist() == [145, 149, 189, 246]


def test_every_window_can_be_drawn():
    text = np.arange(5, dtype=np.uint8)
    tokens, targets = ByteCorpus(text, text[:0]).batch(0, 0, batch_size=200, seq_len=2)
    assert set(tokens[:, 0].tolist()) == {0, 1, 2}
    assert targets.max() == 4


@pytest.mark.parametrize("num_bytes", [0, 1, 64])
def test_text_shorter_than_a_window(num_bytes):
    text = np.zeros(num_bytes, np.uint8)
    with pytest.raises(ValueError, match=rf"seq_len \+ 1 = 65 .* got {num_bytes}"):
        ByteCorpus(text, text).batch(0, 0, batch_size=1, seq_len=64)


def test_text_of_exactly_one_window():
    text = np.arange(65, dtype=np.uint8)
    tokens, targets = ByteCorpus(text, text).batch(0, 0, batch_size=2, seq_len=64)
    np.testing.assert_array_equal(tokens, [text[:-1]] * 2)
    np.testing.assert_array_equal(targets, [text[1:]] * 2)


@pytest.mark.parametrize("module", [data_module, entropy_module])
def test_numpy_is_the_only_dependency(module):
    imported = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    foreign = {
        name for name in imported if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert foreign == {"numpy", "jaxinf.typing"}
