"""A kernel's work on blocks beside the update: int8 codes and checksums.

The headers are compiled separately, in each of their variants, not only this
processor's.
"""

import ctypes

import numpy as np
import pytest
from families import family

from jaxinf.layout.codecs import decode_int8, encode_int8
from jaxinf.native import toolchain
from jaxinf.transfer import crc32c

SOURCE = """
#include "shell.hpp"
#include <algorithm>
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void encode(const float* x, long num, unsigned first, unsigned key,
                       unsigned char* codes, float* scales) {
  const jaxinf::FlushToZero section;
  jaxinf::SideBySide none;
  jaxinf::encode_blocks(x, 0, num, first, key, codes, scales, none);
}
EXPORTED void decode(const unsigned char* codes, const float* scales, long num,
                       float* x) {
  const jaxinf::FlushToZero section;
  jaxinf::decode_blocks(codes, scales, 0, num, x);
}
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
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    place = tmp_path_factory.mktemp("passes")
    source, output = place / "passes.cpp", place / "passes.so"
    source.write_text(SOURCE)
    toolchain.compile_source(source, output, compiler=compiler, level=request.param)
    return ctypes.CDLL(str(output))


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def numbers(rng, kind):
    """Draws arrays of any length and many magnitudes; denormals are zero."""
    num = int(rng.integers(1, 1200))
    exponents = rng.integers(-12, 3, num) + rng.integers(-20, 20)
    x = (rng.standard_normal(num) * 10.0**exponents).astype(np.float32)
    if kind == "positive":
        x = np.abs(x)
    elif kind == "zeros":
        x[rng.integers(0, num, 5)], x[rng.integers(0, num, 5)] = 0.0, -0.0
    elif kind == "no number":
        odd = [np.nan, np.inf, -np.inf, 2.0**126, -(2.0**126), 2.0**127]
        x[rng.integers(0, num)] = rng.choice(odd)
    elif kind == "nothing":
        x[:] = 0
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0
    return x


@pytest.mark.parametrize("kind", ["any", "positive", "zeros", "no number", "nothing"])
def test_int8_blocks_have_numpys_bits(library, kind):
    rng = np.random.default_rng(0)
    for turn in range(300):
        x = numbers(rng, kind)
        first, key = (int(n) for n in rng.integers(0, 2**32, 2))
        first -= first % 256 if turn % 4 else 0  # as in stores, or any
        codes = np.empty((2, x.size), np.uint8)
        expected, found = (np.empty(-(-x.size // 256), np.float32) for _ in range(2))
        encode_int8(x, codes[0], expected, key, first)
        library.encode(
            pointer(x), ctypes.c_long(x.size), ctypes.c_uint(first),
            ctypes.c_uint(key), pointer(codes[1]), pointer(found),
        )  # fmt: skip
        np.testing.assert_array_equal(codes[1], codes[0])
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
        back = np.empty_like(x)
        library.decode(
            pointer(codes[0]), pointer(found), ctypes.c_long(x.size), pointer(back)
        )
        np.testing.assert_array_equal(back, decode_int8(codes[0], found))


@pytest.mark.parametrize("scale", [0.0, 1.0, -1.0, 3e-7, -7e29, 2.0**-126])
def test_every_code_has_numpys_bits(library, scale):
    codes, scales = np.arange(256, dtype=np.uint8), np.float32([scale])
    found = np.empty(256, np.float32)
    library.decode(pointer(codes), pointer(scales), ctypes.c_long(256), pointer(found))
    np.testing.assert_array_equal(found, decode_int8(codes, scales))


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
