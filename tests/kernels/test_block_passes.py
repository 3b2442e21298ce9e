"""Checksums beside the update, in each variant of the headers on any processor."""

import ctypes

import numpy as np
import pytest
from families import family

from jaxinf.native import toolchain
from jaxinf.transfer import crc32c

SOURCE = """
#include "shell.hpp"
#include <algorithm>
#define EXPORTED extern "C" __attribute__((visibility("default")))

// Three arrays, each of so many bytes, `step` at a time. `fold`: which of the
// processor's, or -1 for none.
EXPORTED void sums(const unsigned char* data, const long* num_bytes, long step,
                     int fold, unsigned* sums) {
  jaxinf::Sum own[3];
  const long longest = std::max({num_bytes[0], num_bytes[1], num_bytes[2]});
  for (long at = 0; at < longest; at += step) {
    jaxinf::Span spans[3];
    int num = 0;
    for (int k = 0; k < 3; ++k)
      if (at < num_bytes[k])
        spans[num++] = {data + at, std::min(step, num_bytes[k] - at), own + k};
    if (fold >= 0) {
      jaxinf::add_to_sums(spans, num, jaxinf::folds.of[fold]);
    } else {
      if (num == 3) jaxinf::add_side_by_side<3>(spans);
      if (num == 2) jaxinf::add_side_by_side<2>(spans);
      if (num == 1) jaxinf::add_side_by_side<1>(spans);
    }
  }
  for (int k = 0; k < 3; ++k) sums[k] = jaxinf::finished(own[k]);
}
EXPORTED int can_fold(int fold) { return jaxinf::folds.of[fold] != nullptr; }
"""


@pytest.fixture(
    scope="module", params=family(toolchain.levels(), short=toolchain.levels()[:1])
)
def library(request, tmp_path_factory):
    compiler = toolchain.find_compiler()
    place = tmp_path_factory.mktemp("passes")
    source, output = place / "passes.cpp", place / "passes.so"
    source.write_text(SOURCE)
    toolchain.compile_source(source, output, compiler=compiler, level=request.param)
    return ctypes.CDLL(str(output))


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.parametrize("fold", [-1, 0, 1, 2])
@pytest.mark.parametrize("step", [8, 512, 2048, 10_000])
@pytest.mark.parametrize(
    "lengths", [(0, 1, 7), (255, 256, 257), (4096, 512, 8), (9999, 2048, 5000)]
)
def test_checksums_are_the_librarys(library, fold, step, lengths):
    if fold >= 0 and not library.can_fold(fold):
        pytest.skip("this processor lacks the instructions of this fold")
    data = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    found, num = np.empty(3, np.uint32), np.array(lengths, np.int64)
    library.sums(pointer(data), pointer(num), ctypes.c_long(step), fold, pointer(found))
    assert found.tolist() == [crc32c(data[:n]) for n in lengths]
