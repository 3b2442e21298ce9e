// The arithmetic of block codes: sixteen elements at a time with AVX-512, eight elsewhere.
// All give the same bits.
//
// `rank`: of 10^-1 … 10^-last, how many a number in [0, 1] exceeds. Its bits leave two
// candidates: with AVX-512 by the exponent, as an octave contains at most one power of
// ten; with AVX2 by a line for the logarithm, whose parts contain one each. Then one
// comparison decides.
#pragma once

#include "lanes.hpp"

namespace jaxinf {

constexpr float tenths_of_one[8] = {1e0f,  1e-1f, 1e-2f, 1e-3f,
                                    1e-4f, 1e-5f, 1e-6f, 1e-7f};

// 10^(last - rank) * 2^rank, by rank; all are exact.
constexpr float code_factor(int last, int rank) {
  float factor = 1.0f;
  for (int k = 0; k < last; ++k) factor *= k < rank ? 2.0f : 10.0f;
  return factor;
}
#define JAXINF_CODE_FACTORS \
  template <int last> \
  static constexpr F32 factors = { \
      code_factor(last, 0), code_factor(last, 1), code_factor(last, 2), \
      code_factor(last, 3), code_factor(last, 4), code_factor(last, 5), \
      code_factor(last, 6), code_factor(last, 7)};

// 10 * 2^e over the power of ten of a decade, by the last bits of the exponent of a code
// as a float; all are exact. Signed codes are multiplied by 4, so that zero has a place of
// its own, where the divisor is infinite.
template <bool is_signed, int size>
struct CodeDivisors {
  float of[size];

  constexpr CodeDivisors() : of() {
    constexpr int last = is_signed ? 6 : 7, shift = is_signed ? 2 : 0;
    for (int k = 0; k < size; ++k) of[k] = __builtin_inff();
    for (int e = 0; e <= last; ++e) {
      float divisor = 10.0f;
      for (int k = 0; k < last + shift; ++k) divisor *= k < e + shift ? 2.0f : 1.0f;
      for (int k = e; k < last; ++k) divisor *= 10.0f;
      of[(127 + e + shift) % size] = divisor;
    }
  }
};
template <bool is_signed, int size>
constexpr CodeDivisors<is_signed, size> code_divisors{};

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct CodeLanes {
  static constexpr int size = 16, vectors_at_once = 1;
  typedef float F32 __attribute__((vector_size(64)));
  typedef std::int32_t I32 __attribute__((vector_size(64)));
  typedef std::uint32_t U32 __attribute__((vector_size(64)));
  typedef __mmask16 Mask;

  static constexpr U32 numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  JAXINF_CODE_FACTORS

  static JAXINF_INLINE F32 load(const float* from) {
    return (F32)_mm512_loadu_ps(from);
  }
  static JAXINF_INLINE F32 abs(F32 x) { return (F32)((I32)x & 0x7fffffff); }
  static JAXINF_INLINE F32 f32(I32 x) { return (F32)_mm512_cvtepi32_ps((__m512i)x); }
  static JAXINF_INLINE I32 truncated(F32 x) {
    return (I32)_mm512_cvttps_epi32((__m512)x);
  }
  // a + b / 65536, where the quotient is exact.
  static JAXINF_INLINE F32 plus_share(F32 a, F32 b) {
    return (F32)_mm512_fmadd_ps((__m512)b, _mm512_set1_ps(1.0f / 65536.0f), (__m512)a);
  }
  static JAXINF_INLINE I32 max(I32 a, I32 b) {
    return (I32)_mm512_max_epi32((__m512i)a, (__m512i)b);
  }
  static JAXINF_INLINE U32 max(U32 a, U32 b) {
    return (U32)_mm512_max_epu32((__m512i)a, (__m512i)b);
  }
  static JAXINF_INLINE std::int32_t largest(I32 x) {
    return _mm512_reduce_max_epi32((__m512i)x);
  }
  static JAXINF_INLINE Word largest(U32 x) {
    return _mm512_reduce_max_epu32((__m512i)x);
  }
  static JAXINF_INLINE F32 lookup(F32 table, I32 index) {
    return (F32)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
  }
  // a * b + c, where all of it is exact.
  static JAXINF_INLINE F32 exact_fma(F32 a, F32 b, F32 c) {
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
  // Codes as integers; signed ones times 4.
  template <bool is_signed>
  static JAXINF_INLINE I32 load_codes(const std::uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
    return is_signed ? (I32)_mm512_cvtepi8_epi32(bytes) << 2
                     : (I32)_mm512_cvtepu8_epi32(bytes);
  }
  // Stores codes, given each and 1, with the signs of the numbers at `v`; in a block
  // without signs only zero becomes zero.
  template <bool is_signed>
  static JAXINF_INLINE void store_codes(const I32* above, const float* v,
                                        std::uint8_t* to) {
    const __m512i code = (__m512i)(*above - 1), zero = _mm512_setzero_si512();
    const __m512 x = (__m512)load(v);
    const Mask mask = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(),
                                         is_signed ? _CMP_LT_OQ : _CMP_GT_OQ);
    const __m512i found =
        is_signed ? _mm512_mask_sub_epi32(code, mask, zero, code)
                  : _mm512_maskz_max_epi32(mask, code, _mm512_set1_epi32(1));
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(found));
  }

  static JAXINF_INLINE void store_upper_halves(const U32* x, std::uint16_t* to) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)(*x >> 16)));
  }

  // By the lowest 5 bits of the exponent, from 2^-24 in place 7 to 1 in place 31.
  struct Octaves {
    alignas(64) float bounds[32];
    alignas(64) std::int32_t ranks[32];  // of numbers above the bound

    constexpr explicit Octaves(int last) : bounds(), ranks() {
      float above = 2.0f;  // the octave is [above / 2, above)
      for (int place = 31; place >= 0; --place, above /= 2.0f) {
        int decade = 0;
        while (decade < last && tenths_of_one[decade + 1] >= above) ++decade;
        ranks[place] = last - decade;
        bounds[place] = decade < last ? tenths_of_one[decade + 1] : -1.0f;
      }
    }
  };

  template <int last>
  static JAXINF_INLINE I32 rank(F32 y) {
    static constexpr Octaves octaves(last);
    const I32 exponent = max((I32)y >> 23, I32{} + 103);
    const auto from = [&](const void* table) {
      const char* const half = (const char*)table;
      return _mm512_permutex2var_epi32(_mm512_load_si512(half), (__m512i)exponent,
                                       _mm512_load_si512(half + 64));
    };
    const __m512i most = from(octaves.ranks);
    const Mask is_less =
        _mm512_cmp_ps_mask((__m512)y, (__m512)from(octaves.bounds), _CMP_LE_OQ);
    return (I32)_mm512_mask_sub_epi32(most, is_less, most, _mm512_set1_epi32(1));
  }
};

#else

struct CodeLanes : Lanes {
  static constexpr U32 numbers = {0, 1, 2, 3, 4, 5, 6, 7};
  JAXINF_CODE_FACTORS

  static JAXINF_INLINE I32 truncated(F32 x) { return __builtin_convertvector(x, I32); }
  static JAXINF_INLINE F32 lookup(F32 table, I32 index) {
    return jaxinf::lookup(table, index);
  }

#if defined(__AVX2__) && defined(__FMA__)

  static constexpr int vectors_at_once = 4;

  static JAXINF_INLINE F32 exact_fma(F32 a, F32 b, F32 c) { return fma(a, b, c); }

  // Codes as integers; signed ones times 4.
  template <bool is_signed>
  static JAXINF_INLINE I32 load_codes(const std::uint8_t* from) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
    return is_signed ? (I32)_mm256_cvtepi8_epi32(bytes) << 2
                     : (I32)_mm256_cvtepu8_epi32(bytes);
  }

  template <class Max>
  static JAXINF_INLINE std::int32_t largest(__m256i x, Max max) {
    __m128i y = max(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = max(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(max(y, _mm_shuffle_epi32(y, 0xb1)));
  }
  static JAXINF_INLINE std::int32_t largest(I32 x) {
    const auto max = [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); };
    return largest((__m256i)x, max);
  }
  static JAXINF_INLINE Word largest(U32 x) {
    const auto max = [](__m128i a, __m128i b) { return _mm_max_epu32(a, b); };
    return (Word)largest((__m256i)x, max);
  }
  static JAXINF_INLINE F32 plus_share(F32 a, F32 b) {
    return fma(b, constant(1.0f / 65536.0f), a);
  }
  // Stores codes, given each and 1, with the signs of the numbers at `v`; in a block
  // without signs only zero becomes zero.
  template <bool is_signed>
  static JAXINF_INLINE void store_codes(const I32* above, const float* v,
                                        std::uint8_t* to) {
    const auto halves = [](auto&& of, int k) {
      return _mm256_packs_epi32((__m256i)of(k), (__m256i)of(k + 1));
    };
    const auto numbers = [&](int k) { return load(v + k * size); };
    const auto codes = [&](int k) { return above[k]; };
    __m256i bytes;
    if (is_signed) {
      bytes = _mm256_packus_epi16(halves(codes, 0), halves(codes, 2));
      const __m256i signs = _mm256_packs_epi16(halves(numbers, 0), halves(numbers, 2));
      bytes = _mm256_sign_epi8(_mm256_sub_epi8(bytes, _mm256_set1_epi8(1)), signs);
    } else {
      const auto are_above = [&](int k) { return numbers(k) > 0.0f; };
      const __m256i one = _mm256_set1_epi16(1);
      bytes = _mm256_packus_epi16(_mm256_sub_epi16(halves(codes, 0), one),
                                  _mm256_sub_epi16(halves(codes, 2), one));
      bytes = _mm256_max_epu8(bytes, _mm256_set1_epi8(1)) &
              _mm256_packs_epi16(halves(are_above, 0), halves(are_above, 2));
    }
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
  }

  static JAXINF_INLINE void store_upper_halves(const U32* x, std::uint16_t* to) {
#pragma GCC unroll 2
    for (int k = 0; k < vectors_at_once; k += 2) {
      const __m256i both = _mm256_packus_epi32((__m256i)(x[k] >> 16),
                                               (__m256i)(x[k + 1] >> 16));
      _mm256_storeu_si256((__m256i*)(to + k * size),
                          _mm256_permute4x64_epi64(both, 0xd8));
    }
  }

  // The upper half of a number's bits is near 128 * (127 + log2 y): 154 / 65536 of a
  // difference of such halves is that of decades. Part k, of 0 … last, begins between two
  // powers of ten and contains 10^(k - last).
  template <int last>
  static JAXINF_INLINE I32 rank(F32 y) {
    constexpr auto bound = [](int k) {
      return k <= last ? tenths_of_one[last - k] : 0.0f;
    };
    constexpr F32 bounds = {bound(0), bound(1), bound(2), bound(3),
                            bound(4), bound(5), bound(6), bound(7)};
    constexpr int begin = 16256 - (2 * last + 1) * 65536 / 154 / 2;
    const __m256i zero = _mm256_set1_epi32(begin << 16 | 0xffff);
    const __m256i above = _mm256_subs_epu16((__m256i)y, zero);
    const __m256i part = _mm256_srli_epi32(
        _mm256_mulhi_epu16(above, _mm256_set1_epi32(154 << 16)), 16);
    return (I32)part - ((I32)y > (I32)lookup(bounds, (I32)part));
  }

#else

  static constexpr int vectors_at_once = 1;

  // Codes as integers; signed ones times 4.
  template <bool is_signed>
  static JAXINF_INLINE I32 load_codes(const std::uint8_t* from) {
    I32 codes;
    for (int k = 0; k < size; ++k)
      codes[k] = is_signed ? 4 * (std::int8_t)from[k] : from[k];
    return codes;
  }
  static JAXINF_INLINE F32 exact_fma(F32 a, F32 b, F32 c) { return a * b + c; }

  template <class V>
  static JAXINF_INLINE auto largest(V x) {
    auto found = x[0];
    for (int k = 1; k < size; ++k) found = found < x[k] ? x[k] : found;
    return found;
  }
  static JAXINF_INLINE F32 plus_share(F32 a, F32 b) {
    return a + b * (1.0f / 65536.0f);
  }
  // Stores codes, given each and 1, with the signs of the numbers at `v`; in a block
  // without signs only zero becomes zero.
  template <bool is_signed>
  static JAXINF_INLINE void store_codes(const I32* above, const float* v,
                                        std::uint8_t* to) {
    const F32 x = load(v);
    const I32 code = *above - 1;
    jaxinf::store_bytes(is_signed ? select(x < 0.0f, -code, code) & 0xff
                                  : max(code, I32{} + 1) & (x > 0.0f), to);
  }
  static JAXINF_INLINE void store_upper_halves(const U32* x, std::uint16_t* to) {
    for (int k = 0; k < size; ++k) to[k] = (std::uint16_t)((*x)[k] >> 16);
  }

  template <int last>
  static JAXINF_INLINE I32 rank(F32 y) {
    I32 rank = I32{} + last;
#pragma GCC unroll 8
    for (int k = 1; k <= last; ++k) rank += y <= tenths_of_one[k];
    return rank;
  }

#endif
};

#endif

#undef JAXINF_CODE_FACTORS

}  // namespace jaxinf
