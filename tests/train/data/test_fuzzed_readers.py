"""Whatever is in a file of data or weights, it is read or refused in our words."""

import pytest
from reader_fuzzing import READERS, Readers

CASES, LONG = range(30), range(30, 2000)


@pytest.fixture(scope="module")
def readers():
    with Readers() as child:
        yield child


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "numbers", [CASES, pytest.param(LONG, marks=pytest.mark.long)], ids=["", "long"]
)
def test_files_are_read_or_refused(readers, reader, numbers):
    counts, wrong = readers.run(reader, numbers)
    print(f"{reader} {numbers.start} to {numbers.stop - 1}: {dict(counts)}")
    repeat = "to repeat one: python -m reader_fuzzing READER NUMBER, in tests/support"
    assert not wrong, "\n".join([repeat, *wrong])
    assert counts["ok"] > 1
    assert counts["refused"] > 1
