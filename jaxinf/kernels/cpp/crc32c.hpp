// CRC-32C by the processor's instruction, of several arrays at once.
//
// One sum waits three cycles for each eight bytes, and the processor can begin another
// in each of them: three arrays side by side take the time of one.
#pragma once

#include <cstdint>
#include <cstring>
#include <nmmintrin.h>

namespace jaxinf {

// `sum` goes on from what it is: all ones first, inverted at the end.
struct Span {
  const std::uint8_t* data;
  long num_bytes;
  std::uint32_t* sum;
};

inline std::uint64_t eight_bytes(const std::uint8_t* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

template <int num>
inline void add_side_by_side(const Span* spans) {
  long common = spans[0].num_bytes;
  std::uint64_t sums[num];
  for (int k = 0; k < num; ++k) {
    if (spans[k].num_bytes < common) common = spans[k].num_bytes;
    sums[k] = *spans[k].sum;
  }
  long done = 0;
  for (; done + 8 <= common; done += 8)
#pragma GCC unroll 3
    for (int k = 0; k < num; ++k)
      sums[k] = _mm_crc32_u64(sums[k], eight_bytes(spans[k].data + done));
  for (int k = 0; k < num; ++k) {
    long i = done;
    for (; i + 8 <= spans[k].num_bytes; i += 8)
      sums[k] = _mm_crc32_u64(sums[k], eight_bytes(spans[k].data + i));
    std::uint32_t sum = (std::uint32_t)sums[k];
    for (; i < spans[k].num_bytes; ++i) sum = _mm_crc32_u8(sum, spans[k].data[i]);
    *spans[k].sum = sum;
  }
}

inline void add_to_sums(const Span* spans, int num) {
  for (; num >= 3; num -= 3, spans += 3) add_side_by_side<3>(spans);
  if (num == 2) add_side_by_side<2>(spans);
  if (num == 1) add_side_by_side<1>(spans);
}

}  // namespace jaxinf
