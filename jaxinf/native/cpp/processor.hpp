// What differs between processors: operations on eight elements at a time, and the mode
// of the floating-point unit. All give the same bits.
//
//   x86-64-v3, -v4   instructions
//   x86-64           fused multiply-adds in double, float16 in integers
//   aarch64          as C++ has it, with x86-64's estimates of 1 / sqrt(x) from a table
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define JAXINF_INLINE inline __attribute__((always_inline))

// Defined, it is the table's root on x86-64, too: for vectors that aarch64 must match.
#if !defined(__x86_64__)
#define JAXINF_ROOTS_BY_TABLE
#endif

#include "rsqrt.hpp"

namespace jaxinf {

using Word = std::uint32_t;  // the bits of a 32-bit scalar

constexpr int lane_count = 8;
typedef float F32s __attribute__((vector_size(32)));
typedef std::int32_t I32s __attribute__((vector_size(32)));
typedef std::uint32_t U32s __attribute__((vector_size(32)));

inline Word bits_of_float(float x) {
  Word bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of_bits(Word bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <class R, class Function, class... V>
JAXINF_INLINE R lanewise(Function function, V... x) {
  R result;
  for (int i = 0; i < lane_count; ++i) result[i] = function(x[i]...);
  return result;
}

// ---- float16 in integers, to nearest even; NaNs become quiet

inline float float_of_half(std::uint16_t half) {
  const Word sign = (Word)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude < 0x400u)  // the product is exact
    return float_of_bits(sign | bits_of_float((float)(std::int32_t)magnitude * 0x1p-24f));
  if (magnitude < 0x7c00u) return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
  const Word quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
  return float_of_bits(sign | magnitude << 13 | 0x7f800000u | quiet);
}

inline std::uint16_t half_of_float(float x) {
  const Word bits = bits_of_float(x), magnitude = bits & 0x7fffffffu;
  Word half;
  if (magnitude > 0x7f800000u)
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  else if (magnitude >= 0x477ff000u)
    half = 0x7c00u;
  else if (magnitude >= 0x38800000u)
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  else  // 0.5 has the last place of the denormal numbers
    half = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  return (std::uint16_t)(bits >> 16 & 0x8000u) | (std::uint16_t)half;
}

// ---- eight elements

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

JAXINF_INLINE F32s fused(F32s a, F32s b, F32s c) {
  return (F32s)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
JAXINF_INLINE F32s square_root(F32s x) { return (F32s)_mm256_sqrt_ps((__m256)x); }
// By the last 3 bits of the index.
JAXINF_INLINE F32s lookup(F32s table, I32s index) {
  __asm__("" : "+x"(table));  // from memory it takes twice as long on AMD's processors
  return (F32s)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
}
JAXINF_INLINE F32s widened_halves(const std::uint16_t* from) {
  return (F32s)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
JAXINF_INLINE void narrow_halves(F32s x, std::uint16_t* to) {
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, 0));
}
JAXINF_INLINE F32s rounded_to_half(F32s x) {
  return (F32s)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, 0));
}
// Stores numbers below 256 as bytes.
JAXINF_INLINE void store_bytes(I32s x, std::uint8_t* to) {
  const __m256i words = (__m256i)x;
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words),
                                          _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(halves, halves));
}
// Stores past the caches; the address is a multiple of 32 bytes.
JAXINF_INLINE void store_past_caches(F32s x, float* to) {
  _mm256_stream_ps(to, (__m256)x);
}

#else

#if defined(__x86_64__)

// Calls a function of four elements for each half.
template <class Function, class... V>
JAXINF_INLINE F32s by_halves(Function function, V... x) {
  const auto half = [](const F32s& x, int k) {
    __m128 part;
    std::memcpy(&part, (const char*)&x + 16 * k, sizeof part);
    return part;
  };
  const __m128 parts[2] = {function(half(x, 0)...), function(half(x, 1)...)};
  F32s result;
  std::memcpy(&result, parts, sizeof result);
  return result;
}

// The product is exact in double. The sum is rounded to odd (its last bit is 1 if it is
// not exact), so that rounding it once more gives the float nearest to the exact sum.
JAXINF_INLINE __m128d fused_to_odd(__m128d a, __m128d b, __m128d c) {
  typedef long long I64s __attribute__((vector_size(16)));
  const __m128d product = a * b, sum = product + c, part = sum - product;
  const __m128d error = (product - (sum - part)) + (c - part), zero = {};
  const I64s word = (I64s)sum;
  const I64s above = (I64s)(error > zero), below = (I64s)(error < zero);
  // Towards the error: away from zero if both have the same sign.
  const I64s step = ((I64s)(sum > zero) ^ below) | 1;
  return (__m128d)(word - (step & ((word & 1) - 1) & (above | below)));
}
JAXINF_INLINE F32s fused(F32s a, F32s b, F32s c) {
  const auto four = [](__m128 x, __m128 y, __m128 z) {
    const auto low = [](__m128 v) { return _mm_cvtps_pd(v); };
    const auto high = [](__m128 v) { return _mm_cvtps_pd(_mm_movehl_ps(v, v)); };
    return _mm_movelh_ps(_mm_cvtpd_ps(fused_to_odd(low(x), low(y), low(z))),
                         _mm_cvtpd_ps(fused_to_odd(high(x), high(y), high(z))));
  };
  return by_halves(four, a, b, c);
}
JAXINF_INLINE F32s square_root(F32s x) {
  return by_halves([](__m128 v) { return _mm_sqrt_ps(v); }, x);
}

#else

JAXINF_INLINE F32s fused(F32s a, F32s b, F32s c) {
  return lanewise<F32s>([](float x, float y, float z) {
    return __builtin_fmaf(x, y, z);
  }, a, b, c);
}
JAXINF_INLINE F32s square_root(F32s x) {
  return lanewise<F32s>([](float v) { return __builtin_sqrtf(v); }, x);
}

#endif

JAXINF_INLINE F32s lookup(F32s table, I32s index) {
  return lanewise<F32s>([&](std::int32_t i) { return table[i & 7]; }, index);
}
JAXINF_INLINE F32s widened_halves(const std::uint16_t* from) {
  F32s x;
  for (int i = 0; i < lane_count; ++i) x[i] = float_of_half(from[i]);
  return x;
}
JAXINF_INLINE void narrow_halves(F32s x, std::uint16_t* to) {
  for (int i = 0; i < lane_count; ++i) to[i] = half_of_float(x[i]);
}
JAXINF_INLINE F32s rounded_to_half(F32s x) {
  return lanewise<F32s>([](float v) { return float_of_half(half_of_float(v)); }, x);
}
JAXINF_INLINE void store_bytes(I32s x, std::uint8_t* to) {
  for (int i = 0; i < lane_count; ++i) to[i] = (std::uint8_t)x[i];
}
JAXINF_INLINE void store_past_caches(F32s x, float* to) {
  std::memcpy(to, &x, sizeof x);
}

#endif

// ---- 1 / sqrt(x): the estimate, and whether it is refined twice

// The table that Intel's processors read. The upper 10 bits of the mantissa decide: an
// entry is 1 / sqrt(x) of the number between those that share it, to 13 significant bits.
struct IntelEstimates {
  std::uint16_t entries[num_estimates];

  IntelEstimates() {
    for (Word i = 0; i < num_estimates; ++i) {
      const double octave = i < num_estimates / 2 ? 2.0 : 1.0;
      const double x = octave * (1.0 + ((i >> 2 & 1023u) + 0.5) / 1024.0);
      entries[i] = (std::uint16_t)(4 * (int)(8192.0 / __builtin_sqrt(x) + 0.5));
    }
  }
};

#if defined(JAXINF_ROOTS_BY_TABLE)

inline const IntelEstimates intel_estimates;
constexpr bool refines_twice = true;

JAXINF_INLINE F32s estimated_rsqrt(F32s x) {
  return lanewise<F32s>([](float v) {
    const Word bits = bits_of_float(v);
    return float_of_bits(estimate_of(bits, intel_estimates.entries[estimate_index(bits)]));
  }, x);
}

#else

inline const bool refines_twice = [] {
  __builtin_cpu_init();
  return !__builtin_cpu_is("amd");
}();

JAXINF_INLINE F32s estimated_rsqrt(F32s x) {
#if defined(__AVX__)
  return (F32s)_mm256_rsqrt_ps((__m256)x);
#else
  return by_halves([](__m128 v) { return _mm_rsqrt_ps(v); }, x);
#endif
}

#endif

// ---- the floating-point unit

// Flushes denormal operands and results to zero, as XLA does on CPU.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushToZero() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushToZero() : saved_(mode()) { set_mode(saved_ | std::uint64_t(1) << 24); }
  ~FlushToZero() { set_mode(saved_); }

 private:
  static std::uint64_t mode() {
    std::uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set_mode(std::uint64_t value) {
    __asm__ volatile("msr fpcr, %0" : : "r"(value) : "memory");
  }
  std::uint64_t saved_;
#else
#error "jaxinf's kernels are for x86-64 and aarch64"
#endif
};

// Ends a section of `store_past_caches`.
inline void order_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace jaxinf
