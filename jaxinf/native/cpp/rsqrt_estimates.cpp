// This host's table of estimates of 1 / sqrt(x): see rsqrt.hpp and processor.hpp.
#include <initializer_list>

#include "lanes.hpp"

namespace {

using jaxinf::Lanes;
using jaxinf::Word;

// Returns the results for eight arguments.
JAXINF_INLINE Lanes::U32 instruction(Lanes::U32 x) {
  return (Lanes::U32)jaxinf::estimated_rsqrt((Lanes::F32)x);
}

// Whether arguments that share an entry get the table's result from the instruction.
JAXINF_INLINE bool same(const std::uint16_t* entries, Lanes::U32 x) {
  const Word expected = jaxinf::estimate_of(x[0], entries[jaxinf::estimate_index(x[0])]);
  const Lanes::I32 differs = (Lanes::I32)(instruction(x) != Lanes::U32{} + expected);
  std::int32_t any = 0;
  for (int i = 0; i < Lanes::size; ++i) any |= differs[i];
  return !any;
}

bool is_table(const std::uint16_t* entries) {
  const Lanes::U32 next = {0, 1, 2, 3, 4, 5, 6, 7};
  for (Word exponent = 127; exponent <= 128; ++exponent)  // every mantissa
    for (Word mantissa = 0; mantissa < 1u << 23; mantissa += 8)
      if (!same(entries, (exponent << 23 | mantissa) + next)) return false;
  for (Word exponent = 1; exponent < 255; ++exponent)  // every entry, at both its ends
    for (Word mantissa = 0; mantissa < 1u << 23; mantissa += 1u << 11)
      if (!same(entries, (exponent << 23 | mantissa) + 0x7f8u * (next & 1u) + next))
        return false;
  for (Word x : {0u, 1u, 0x7fffffu, 0x7f800000u, 0x7f800001u, 0x7fffffffu})
    for (Word sign : {0u, 0x80000000u})
      if (!same(entries, Lanes::U32{} + (x | sign))) return false;
  for (Word x = 0x80800000u; x < 0xff800000u; x += 0x10001u)  // negative numbers
    if (!same(entries, Lanes::U32{} + x)) return false;
  return true;
}

}  // namespace

#ifndef JAXINF_ENTRY
#define JAXINF_ENTRY jaxinf_entry
#endif

// Fills `num_estimates` entries. Returns the number of Newton steps in the host's kernels,
// or 0 if the instruction does not read such a table.
extern "C" __attribute__((visibility("default"))) int JAXINF_ENTRY(
    std::uint16_t* entries) {
  for (Word i = 0; i < jaxinf::num_estimates; ++i) {
    const Word x = (128 - (i >> 12)) << 23 | (i & 0xfffu) << 11;
    entries[i] = (std::uint16_t)((instruction(Lanes::U32{} + x)[0] - 0x3e800000u) >> 9);
  }
  return is_table(entries) ? (jaxinf::refines_twice ? 2 : 1) : 0;
}
