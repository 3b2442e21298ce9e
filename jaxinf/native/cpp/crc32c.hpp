// CRC-32C of several arrays, block by block.
//
// If the processor multiplies polynomials in 512-bit lanes (VPCLMULQDQ), all bytes so far
// are folded onto their last 256, which then have the same remainder, and in the end onto
// the last 16. The instruction crc32 gives the checksum of these:
//
//   |A|B|C|D|E|F|G|H|…    A x^2048 + E,  B x^2048 + F,  …     4 lanes of 64 bytes
//
// On other processors an instruction of x86-64 or aarch64 takes all bytes. It needs three
// cycles for eight bytes, and another one can begin in each cycle: three arrays side by
// side take the time of one. Processors without it read a table, byte by byte.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace jaxinf {

// The checksum of an array's bytes so far.
//   sum    before inversion; all ones at the beginning
//   lanes  if `is_folded`, bytes that replace all bytes so far and `sum`
struct Sum {
  alignas(64) std::uint8_t lanes[256];
  std::uint32_t sum = ~0u;
  bool is_folded = false;
};

struct Span {
  const std::uint8_t* data;
  long num_bytes;
  Sum* sum;
};

inline std::uint64_t eight_bytes(const std::uint8_t* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// ---- one instruction for eight bytes

struct CrcTable {
  std::uint32_t of[256];

  constexpr CrcTable() : of() {
    for (std::uint32_t i = 0; i < 256; ++i) {
      of[i] = i;
      for (int k = 0; k < 8; ++k) of[i] = (of[i] >> 1) ^ (of[i] & 1 ? 0x82F63B78u : 0);
    }
  }
};

constexpr CrcTable crc_table{};

inline std::uint32_t crc_of_byte(std::uint32_t sum, std::uint8_t byte) {
  return crc_table.of[(sum ^ byte) & 0xff] ^ sum >> 8;
}

#if defined(__x86_64__)
#define JAXINF_CRC __attribute__((target("sse4.2,crc32")))
JAXINF_CRC inline std::uint64_t crc_of_eight(std::uint64_t sum, std::uint64_t word) {
  return _mm_crc32_u64(sum, word);
}
inline const bool has_crc = [] {
  __builtin_cpu_init();
  return (bool)__builtin_cpu_supports("sse4.2");
}();
#elif defined(__aarch64__)
#define JAXINF_CRC __attribute__((target("+crc")))
JAXINF_CRC inline std::uint64_t crc_of_eight(std::uint64_t sum, std::uint64_t word) {
  return __crc32cd((std::uint32_t)sum, word);
}
inline const bool has_crc = getauxval(AT_HWCAP) >> 7 & 1;
#endif

template <int num>
JAXINF_CRC inline void add_side_by_side(const Span* spans) {
  long common = spans[0].num_bytes;
  std::uint64_t sums[num];
  for (int k = 0; k < num; ++k) {
    if (spans[k].num_bytes < common) common = spans[k].num_bytes;
    sums[k] = spans[k].sum->sum;
  }
  long done = 0;
  for (; done + 8 <= common; done += 8)
#pragma GCC unroll 3
    for (int k = 0; k < num; ++k)
      sums[k] = crc_of_eight(sums[k], eight_bytes(spans[k].data + done));
  for (int k = 0; k < num; ++k) {
    long i = done;
    for (; i + 8 <= spans[k].num_bytes; i += 8)
      sums[k] = crc_of_eight(sums[k], eight_bytes(spans[k].data + i));
    std::uint32_t sum = (std::uint32_t)sums[k];
    for (; i < spans[k].num_bytes; ++i) sum = crc_of_byte(sum, spans[k].data[i]);
    spans[k].sum->sum = sum;
  }
}

inline void add_by_table(const Span& span) {
  std::uint32_t sum = span.sum->sum;
  for (long i = 0; i < span.num_bytes; ++i) sum = crc_of_byte(sum, span.data[i]);
  span.sum->sum = sum;
}

// ---- folding

#if defined(__x86_64__)

// x^power modulo the polynomial, the highest coefficient in the lowest bit.
constexpr std::uint32_t remainder_of_power(int power) {
  std::uint32_t value = 0x80000000u;
  for (int i = 0; i < power; ++i) value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0);
  return value;
}

// The factors that move the halves of 16 bytes `bytes` further. A product of reflected
// factors is one power of x too high, a constant in the low half of its 64 bits is 32 too
// high, and the first half stands 64 above the second.
template <int bytes>
struct Shift {
  static constexpr long long first = remainder_of_power(8 * bytes + 64 - 33);
  static constexpr long long second = remainder_of_power(8 * bytes - 33);
};

#define JAXINF_FOLDS \
  __attribute__((target("avx512f,avx512vl,avx512dq,pclmul,vpclmulqdq,sse4.2,crc32")))

constexpr long fold_bytes = 256;

inline const bool has_folds = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq") &&
         __builtin_cpu_supports("pclmul");
}();

template <int bytes>
JAXINF_FOLDS inline __m512i moved_onto(__m512i lanes, __m512i onto) {
  using By = Shift<bytes>;
  const __m512i by = _mm512_broadcast_i64x2(_mm_set_epi64x(By::second, By::first));
  const __m512i first = _mm512_clmulepi64_epi128(lanes, by, 0x00);
  const __m512i second = _mm512_clmulepi64_epi128(lanes, by, 0x11);
  return _mm512_ternarylogic_epi64(first, second, onto, 0x96);  // all three, xor
}

template <int bytes>
JAXINF_FOLDS inline __m128i moved_onto(__m128i half, __m128i onto) {
  using By = Shift<bytes>;
  const __m128i by = _mm_set_epi64x(By::second, By::first);
  const __m128i first = _mm_clmulepi64_si128(half, by, 0x00);
  const __m128i second = _mm_clmulepi64_si128(half, by, 0x11);
  return _mm_ternarylogic_epi64(first, second, onto, 0x96);
}

// Whole multiples of `fold_bytes`, at least one.
JAXINF_FOLDS inline void fold(Sum& sum, const std::uint8_t* data, long num_bytes) {
  const auto load = [](const std::uint8_t* from) JAXINF_FOLDS {
    return _mm512_loadu_si512((const void*)from);
  };
  __m512i lanes[4];
  long at = 0;
  if (sum.is_folded) {
    for (int k = 0; k < 4; ++k) lanes[k] = load(sum.lanes + 64 * k);
  } else {
    for (int k = 0; k < 4; ++k) lanes[k] = load(data + 64 * k);
    const __m128i begin = _mm_cvtsi32_si128((int)sum.sum);
    lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(begin));
    at = fold_bytes;
  }
  for (; at < num_bytes; at += fold_bytes)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      lanes[k] = moved_onto<fold_bytes>(lanes[k], load(data + at + 64 * k));
    }
  for (int k = 0; k < 4; ++k) _mm512_store_si512(sum.lanes + 64 * k, lanes[k]);
  sum.is_folded = true;
}

JAXINF_FOLDS inline void unfold(Sum& sum) {
  __m512i lanes[4];
  for (int k = 0; k < 4; ++k) lanes[k] = _mm512_load_si512(sum.lanes + 64 * k);
  const __m512i second = moved_onto<64>(lanes[0], lanes[1]);
  const __m512i last = moved_onto<64>(lanes[2], lanes[3]);
  const __m512i all = moved_onto<128>(second, last);
  const __m128i ahead = moved_onto<16>(_mm512_extracti64x2_epi64(all, 0),
                                       _mm512_extracti64x2_epi64(all, 1));
  const __m128i behind = moved_onto<16>(_mm512_extracti64x2_epi64(all, 2),
                                        _mm512_extracti64x2_epi64(all, 3));
  const __m128i left = moved_onto<32>(ahead, behind);
  const std::uint64_t half = _mm_crc32_u64(0, (std::uint64_t)_mm_cvtsi128_si64(left));
  sum.sum = (std::uint32_t)_mm_crc32_u64(half, (std::uint64_t)_mm_extract_epi64(left, 1));
  sum.is_folded = false;
}

#else

constexpr bool has_folds = false;
constexpr long fold_bytes = 256;
inline void fold(Sum&, const std::uint8_t*, long) {}
inline void unfold(Sum&) {}

#endif

// ---- both

inline void add_to_sums(Span* spans, int num) {
  if (has_folds) {
    int num_left = 0;
    for (int k = 0; k < num; ++k) {
      Span span = spans[k];
      const long whole = span.num_bytes & -fold_bytes;
      if (whole) fold(*span.sum, span.data, whole);
      if (whole == span.num_bytes) continue;
      if (span.sum->is_folded) unfold(*span.sum);
      spans[num_left++] = {span.data + whole, span.num_bytes - whole, span.sum};
    }
    num = num_left;
  }
  if (!has_crc) {
    for (int k = 0; k < num; ++k) add_by_table(spans[k]);
    return;
  }
  for (; num >= 3; num -= 3, spans += 3) add_side_by_side<3>(spans);
  if (num == 2) add_side_by_side<2>(spans);
  if (num == 1) add_side_by_side<1>(spans);
}

// Returns the checksum of all bytes so far.
inline std::uint32_t finished(Sum& sum) {
  if (sum.is_folded) unfold(sum);
  return ~sum.sum;
}

}  // namespace jaxinf
