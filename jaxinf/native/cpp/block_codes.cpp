// Blocks of int8 codes outside a kernel: a run of numbers, and their codes and scales.
#include "shell.hpp"

#ifndef JAXINF_ENTRY
#define JAXINF_ENTRY jaxinf_entry
#endif

// Encodes or decodes `num` numbers. `first`: number of the first of them, which with
// `key` decides the rounding.
extern "C" __attribute__((visibility("default"))) int JAXINF_ENTRY(
    std::int64_t num, int decodes, float* values, std::uint8_t* codes, float* scales,
    jaxinf::Word first, jaxinf::Word key) {
  const jaxinf::FlushToZero section;
  jaxinf::SideBySide no_sums;
  if (decodes)
    jaxinf::decode_blocks(codes, scales, 0, (long)num, values);
  else
    jaxinf::encode_blocks(values, 0, (long)num, first, key, codes, scales,
                          no_sums);
  return 0;
}
