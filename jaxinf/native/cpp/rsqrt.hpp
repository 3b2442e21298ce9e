// 1 / sqrt(x) as XLA has it on x86: the processor's estimate, refined by Newton steps.
//
// On x86-64 an instruction gives the estimate. It reads a table: the upper 12 bits of the
// mantissa and the lowest bit of the exponent decide, and a factor of 4 halves the result.
// Cards get this table; hosts of another kind have Intel's (processor.hpp). The code after
// the look-up is the same.
#pragma once

#include <cstdint>

namespace jaxinf {

// ---- the table

constexpr std::uint32_t num_estimates = 8192;

// Returns the index of an argument's entry; the argument is given as bits.
inline std::uint32_t estimate_index(std::uint32_t x) {
  return x >> 11 & (num_estimates - 1);
}

// Returns the instruction's result as bits. `entry`: 16 bits, the estimate of the argument
// in [1, 4) with this index, as its distance above 0.25 in units of 2^9 of its bits.
inline std::uint32_t estimate_of(std::uint32_t x, std::uint32_t entry) {
  const std::uint32_t magnitude = x & 0x7fffffffu, sign = x & 0x80000000u;
  if (magnitude > 0x7f800000u) return x | 0x400000u;     // a quiet NaN
  if (magnitude < 0x800000u) return sign | 0x7f800000u;  // denormals are zero
  if (sign) return 0xffc00000u;                         // a negative number
  if (magnitude == 0x7f800000u) return 0;
  const std::uint32_t halvings = ((x >> 23) + 1) >> 1;
  return 0x5e800000u + (entry << 9) - (halvings << 23);
}

// ---- the refinement; L: lanes of a host or of a card

template <class L>
JAXINF_INLINE typename L::F32 newton_step(typename L::F32 x, typename L::F32 y) {
  return L::fma(L::constant(-0.5f) * y, L::fma(x * y, y, L::constant(-1.0f)), y);
}

// XLA takes one step with AMD's estimate, which is closer, and two with others. It takes
// none for arguments whose estimate is exact: zeros, infinities, negative numbers, NaNs.
template <class L>
JAXINF_INLINE typename L::F32 refined_rsqrt(typename L::F32 x,
                                            typename L::F32 estimate, bool twice) {
  using F32 = typename L::F32;
  using I32 = typename L::I32;
  using U32 = typename L::U32;
  const F32 once = newton_step<L>(x, estimate);
  const F32 refined = twice ? newton_step<L>(x, once) : once;
  const I32 word = L::as_i32(x), magnitude = word & 0x7fffffff;
  const I32 denormal = (I32)((U32)magnitude - 1u < U32{} + 0x7fffffu);
  const I32 negative = (word < 0) & ((U32)magnitude - 0x800000u < U32{} + 0x7f000000u);
  const I32 exact = (magnitude == 0x7f800000) | (word == 0) | denormal | negative;
  return L::select(exact, estimate, refined);
}

}  // namespace jaxinf
