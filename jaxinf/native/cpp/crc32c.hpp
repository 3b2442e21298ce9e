// CRC-32C of several arrays, block by block.
//
// If the processor multiplies polynomials, all bytes so far are folded onto their last
// 256, which then have the same remainder, and in the end onto the last 16. The
// instruction crc32 gives the checksum of these:
//
//   |A|B|C|D|E|F|G|H|…    A x^2048 + E,  B x^2048 + F,  …
//
// Registers of 64 and 32 bytes (VPCLMULQDQ) or of 16 (PCLMULQDQ) leave the same bytes.
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

constexpr long fold_bytes = 256;

// Folds whole multiples of `fold_bytes`, at least one.
using Fold = void(Sum& sum, const std::uint8_t* data, long num_bytes);

// A function `name` for registers V of a processor with `features`. It takes 4 or 8 of
// them at a time, so that each product has come when the next one needs it.
#define JAXINF_FOLD(name, V, features, num_at_a_time, load, store, multiply, spread) \
  __attribute__((target(features))) inline void name(Sum& sum, const std::uint8_t* data, \
                                                      long num_bytes) { \
    using By = Shift<fold_bytes>; \
    const V by = spread(_mm_set_epi64x(By::second, By::first)); \
    const long begin = sum.is_folded ? 0 : fold_bytes; \
    if (begin) { \
      std::memcpy(sum.lanes, data, fold_bytes); \
      for (int k = 0; k < 4; ++k) sum.lanes[k] ^= (std::uint8_t)(sum.sum >> 8 * k); \
      sum.is_folded = true; \
    } \
    constexpr long width = (num_at_a_time) * (long)sizeof(V); \
    for (long part = 0; part < fold_bytes; part += width) { \
      V lanes[num_at_a_time]; \
      for (int k = 0; k < (num_at_a_time); ++k) \
        lanes[k] = load((const V*)(sum.lanes + part) + k); \
      for (long at = begin + part; at < num_bytes; at += fold_bytes) \
        _Pragma("GCC unroll 8") for (int k = 0; k < (num_at_a_time); ++k) lanes[k] = \
            multiply(lanes[k], by, 0x00) ^ multiply(lanes[k], by, 0x11) ^ \
            load((const V*)(data + at) + k); \
      for (int k = 0; k < (num_at_a_time); ++k) \
        store((V*)(sum.lanes + part) + k, lanes[k]); \
    } \
  }
JAXINF_FOLD(fold_by_64, __m512i, "avx512f,vpclmulqdq", 4, _mm512_loadu_si512,
            _mm512_storeu_si512, _mm512_clmulepi64_epi128, _mm512_broadcast_i32x4)
JAXINF_FOLD(fold_by_32, __m256i, "avx2,vpclmulqdq", 8, _mm256_loadu_si256,
            _mm256_storeu_si256, _mm256_clmulepi64_epi128, _mm256_broadcastsi128_si256)
JAXINF_FOLD(fold_by_16, __m128i, "sse4.2,pclmul", 8, _mm_loadu_si128, _mm_storeu_si128,
            _mm_clmulepi64_si128, )
#undef JAXINF_FOLD

// Those of this processor, best first, then null.
struct Folds {
  Fold* of[4] = {};
  Fold* faster_than_three = nullptr;  // arrays of a length side by side

  Folds() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul") || !has_crc) return;
    int num = 0;
    if (__builtin_cpu_supports("vpclmulqdq")) {
      if (__builtin_cpu_supports("avx512f")) faster_than_three = of[num++] = fold_by_64;
      if (__builtin_cpu_supports("avx2")) of[num++] = fold_by_32;
    }
    of[num] = fold_by_16;
  }
};
inline const Folds folds;

__attribute__((target("sse4.2,crc32,pclmul"))) inline void unfold(Sum& sum) {
  using By = Shift<16>;
  const __m128i by = _mm_set_epi64x(By::second, By::first);
  __m128i left = _mm_loadu_si128((const __m128i*)sum.lanes);
  for (long at = 16; at < fold_bytes; at += 16)
    left = _mm_clmulepi64_si128(left, by, 0x00) ^ _mm_clmulepi64_si128(left, by, 0x11) ^
           _mm_loadu_si128((const __m128i*)(sum.lanes + at));
  const std::uint64_t half = _mm_crc32_u64(0, (std::uint64_t)_mm_cvtsi128_si64(left));
  sum.sum = (std::uint32_t)_mm_crc32_u64(half, (std::uint64_t)_mm_extract_epi64(left, 1));
  sum.is_folded = false;
}

#else

constexpr long fold_bytes = 256;
using Fold = void(Sum&, const std::uint8_t*, long);
struct Folds {
  Fold* of[4] = {};
  Fold* faster_than_three = nullptr;
};
inline const Folds folds;
inline void unfold(Sum&) {}

#endif

// ---- both

inline void add_to_sums(Span* spans, int num, Fold* fold = folds.of[0]) {
  const bool are_three = num == 3 && spans[0].num_bytes == spans[1].num_bytes &&
                         spans[0].num_bytes == spans[2].num_bytes;
  if (are_three && fold != folds.faster_than_three) {
    for (int k = 0; k < num; ++k)
      if (spans[k].sum->is_folded) unfold(*spans[k].sum);
  } else if (fold) {
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

// A part of three arrays, as long in each, that is added in steps.
struct Three {
  const std::uint8_t* data[3];
  std::uint64_t sums[3];
  long num_bytes = 0;

  template <int bytes>
  JAXINF_CRC void step() {
#pragma GCC unroll 8
    for (long i = 0; i < bytes; i += 8)
#pragma GCC unroll 3
      for (int k = 0; k < 3; ++k)
        sums[k] = crc_of_eight(sums[k], eight_bytes(data[k] + i));
    for (int k = 0; k < 3; ++k) data[k] += bytes;
  }
};

// Arrays that are added between the instructions of other work, three at a time and long
// ones first, by the instruction crc32. They must stay as they are until `finish`; a sum
// has one of them at most.
class SideBySide {
 public:
  static constexpr int max_spans = 64;

  void add(const Span& span) {
    const int kind = span.num_bytes < many_bytes;
    if (span.num_bytes < few_bytes || num_[kind] == max_spans)
      return add_side_by_side<1>(&span);
    Span& place = spans_[kind][num_[kind]++];
    place.data = span.data;
    place.num_bytes = span.num_bytes;
    place.sum = span.sum;
  }

  // Begins a part of so many bytes, or of none. The caller takes all its steps before it
  // ends it.
  Three begin_part(long num_bytes) {
    Three three;
    for (int kind = 0; kind < 2; ++kind)
      while (num_now_ < 3 && next_[kind] < num_[kind])
        now_[num_now_++] = &spans_[kind][next_[kind]++];
    if (num_now_ < 3) return three;
    for (int k = 0; k < 3; ++k)
      if (now_[k]->num_bytes < num_bytes) return three;
    for (int k = 0; k < 3; ++k) {
      three.data[k] = now_[k]->data;
      three.sums[k] = now_[k]->sum->sum;
    }
    three.num_bytes = num_bytes;
    return three;
  }
  void end_part(const Three& three) {
    if (!three.num_bytes) return;
    for (int k = 2; k >= 0; --k) {
      now_[k]->sum->sum = (std::uint32_t)three.sums[k];
      now_[k]->data = three.data[k];
      now_[k]->num_bytes -= three.num_bytes;
      if (!now_[k]->num_bytes) now_[k] = now_[--num_now_];
    }
  }

  void finish() {
    Span left[2 * max_spans];
    int num_left = 0;
    for (int kind = 0; kind < 2; ++kind) {
      for (int k = 0; k < num_[kind]; ++k)
        if (spans_[kind][k].num_bytes) left[num_left++] = spans_[kind][k];
      num_[kind] = next_[kind] = 0;
    }
    num_now_ = 0;
    add_to_sums(left, num_left, nullptr);
  }

 private:
  static constexpr long few_bytes = 64, many_bytes = 1024;

  Span spans_[2][max_spans];  // long ones, others
  int num_[2] = {}, next_[2] = {};
  Span* now_[3];
  int num_now_ = 0;
};

// Returns the checksum of all bytes so far.
inline std::uint32_t finished(Sum& sum) {
  if (sum.is_folded) unfold(sum);
  return ~sum.sum;
}

}  // namespace jaxinf
