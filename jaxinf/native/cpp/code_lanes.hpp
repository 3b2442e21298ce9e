// The arithmetic of block codes: sixteen elements at a time with AVX-512, eight elsewhere.
// Both give the same bits.
//
// `decade`: how many of 10^-1 … 10^-last a number in [0, 1] does not exceed. An octave
// contains at most one power of ten, so its exponent leaves two candidates.
#pragma once

#include "lanes.hpp"

namespace jaxinf {

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct CodeLanes {
  static constexpr int size = 16;
  typedef float F32 __attribute__((vector_size(64)));
  typedef std::int32_t I32 __attribute__((vector_size(64)));
  typedef std::uint32_t U32 __attribute__((vector_size(64)));
  typedef __mmask16 Mask;

  static constexpr U32 numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static constexpr F32 factors = {1e0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f};

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
  static JAXINF_INLINE I32 min(I32 a, I32 b) {
    return (I32)_mm512_min_epi32((__m512i)a, (__m512i)b);
  }
  // Of numbers that are not negative.
  static JAXINF_INLINE std::int32_t largest(I32 x) {
    return _mm512_reduce_max_epi32((__m512i)x);
  }
  static JAXINF_INLINE Mask is_negative(F32 x) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_LT_OQ);
  }
  static JAXINF_INLINE bool any(Mask mask) { return mask != 0; }
  static JAXINF_INLINE F32 lookup(F32 table, I32 index) {
    return (F32)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
  }
  // -code where v < 0.
  static JAXINF_INLINE I32 with_sign(I32 code, F32 v) {
    return (I32)_mm512_mask_sub_epi32((__m512i)code, is_negative(v),
                                      _mm512_setzero_si512(), (__m512i)code);
  }
  // At least 1 where v > 0, else 0.
  static JAXINF_INLINE I32 of_positive(I32 code, F32 v) {
    const Mask is_above =
        _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ);
    return (I32)_mm512_maskz_max_epi32(is_above, (__m512i)code, _mm512_set1_epi32(1));
  }
  static JAXINF_INLINE void store_bytes(I32 x, std::uint8_t* to) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
  }

  // By the lowest 5 bits of the exponent, from 2^-24 in place 7 to 1 in place 31.
  struct Octaves {
    alignas(64) float bounds[32];
    alignas(64) std::int32_t decades[32];

    constexpr explicit Octaves(int last) : bounds(), decades() {
      constexpr float powers[8] = {1e0f, 1e-1f, 1e-2f, 1e-3f, 1e-4f, 1e-5f, 1e-6f, 1e-7f};
      float above = 2.0f;  // the octave is [above / 2, above)
      for (int place = 31; place >= 0; --place, above /= 2.0f) {
        int decade = 0;
        while (decade < last && powers[decade + 1] >= above) ++decade;
        decades[place] = decade;
        bounds[place] = decade < last ? powers[decade + 1] : -1.0f;
      }
    }
  };

  template <int last>
  static JAXINF_INLINE I32 decade(F32 y) {
    static constexpr Octaves octaves(last);
    const I32 exponent = max((I32)y >> 23, I32{} + 103);
    const auto from = [&](const void* table) {
      const char* const half = (const char*)table;
      return _mm512_permutex2var_epi32(_mm512_load_si512(half), (__m512i)exponent,
                                       _mm512_load_si512(half + 64));
    };
    const __m512i least = from(octaves.decades);
    const Mask is_more =
        _mm512_cmp_ps_mask((__m512)y, (__m512)from(octaves.bounds), _CMP_LE_OQ);
    return (I32)_mm512_mask_add_epi32(least, is_more, least, _mm512_set1_epi32(1));
  }
};

#else

struct CodeLanes : Lanes {
  using Mask = I32;
  static constexpr U32 numbers = {0, 1, 2, 3, 4, 5, 6, 7};
  static constexpr F32 factors = {1e0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f};

  static JAXINF_INLINE I32 truncated(F32 x) { return __builtin_convertvector(x, I32); }
  static JAXINF_INLINE F32 plus_share(F32 a, F32 b) {
    return a + b * (1.0f / 65536.0f);
  }
  // Of numbers that are not negative.
  static JAXINF_INLINE std::int32_t largest(I32 x) {
    std::int32_t found = 0;
    for (int k = 0; k < size; ++k) found = found < x[k] ? x[k] : found;
    return found;
  }
  static JAXINF_INLINE Mask is_negative(F32 x) { return x < 0.0f; }
  static JAXINF_INLINE bool any(Mask mask) {
    std::int32_t found = 0;
    for (int k = 0; k < size; ++k) found |= mask[k];
    return found != 0;
  }
  static JAXINF_INLINE F32 lookup(F32 table, I32 index) {
    return jaxinf::lookup(table, index);
  }
  static JAXINF_INLINE I32 with_sign(I32 code, F32 v) {
    return select(v < 0.0f, -code, code) & 0xff;
  }
  static JAXINF_INLINE I32 of_positive(I32 code, F32 v) {
    return max(code, I32{} + 1) & (v > 0.0f);
  }
  static JAXINF_INLINE void store_bytes(I32 x, std::uint8_t* to) {
    jaxinf::store_bytes(x, to);
  }

  template <int last>
  static JAXINF_INLINE I32 decade(F32 y) {
    constexpr float bounds[8] = {1e0f, 1e-1f, 1e-2f, 1e-3f, 1e-4f, 1e-5f, 1e-6f, 1e-7f};
    I32 decade = {};
#pragma GCC unroll 8
    for (int k = 1; k <= last; ++k) decade -= y <= bounds[k];
    return decade;
  }
};

#endif

}  // namespace jaxinf
