// CRC-32C of 64 bytes a cycle.
//
// A checksum is linear: each bit of the next one is the parity of some bits of the 64
// bytes and of some bits of the last checksum. `crc_rows` lists these bits, and a
// synthesiser turns the lists into 32 trees of XORs. Only the short trees, over the last
// checksum, are in the loop's path from one cycle to the next.
#pragma once

#include "streams.hpp"

// Emulated cards may use this CPU's instructions for a checksum and a multiply-add: they
// give the same bits sooner. The testbenches compare the two.
#if defined(JAXINF_CPU_INSTRUCTIONS) && defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

namespace jaxinf {

constexpr Word crc_polynomial = 0x82f63b78u;  // Castagnoli's, bits reversed

constexpr Word crc_step(Word crc) { return crc >> 1 ^ (crc & 1 ? crc_polynomial : 0); }

struct CrcRows {
  Word of[32][16];  // of[j][w]: which bits of word w decide bit j

  constexpr CrcRows() : of() {
    Word effect = 1;  // of the message's last bit, before its step
    for (int bit = 511; bit >= 0; --bit) {
      effect = crc_step(effect);
      for (int j = 0; j < 32; ++j) of[j][bit / 32] |= (effect >> j & 1u) << (bit % 32);
    }
  }
};

constexpr CrcRows crc_rows{};

inline Word parity(Word x) {
  x ^= x >> 16;
  x ^= x >> 8;
  x ^= x >> 4;
  x ^= x >> 2;
  x ^= x >> 1;
  return x & 1u;
}

// Returns the checksum (not yet inverted) after 64 more bytes.
inline Word crc_of_wide_by_rows(Word crc, const Wide& wide) {
#pragma HLS ARRAY_PARTITION variable=crc_rows.of complete dim=0
  Word next = 0;
crc_bits:
  for (int j = 0; j < 32; ++j) {
#pragma HLS UNROLL
    Word selected = 0;
  crc_words:
    for (int w = 0; w < 16; ++w) {
#pragma HLS UNROLL
      selected ^= wide.word[w] & crc_rows.of[j][w];
    }
    const Word of_data = parity(selected);
    const Word of_last = parity(crc & crc_rows.of[j][0]);
    next |= (of_data ^ of_last) << j;
  }
  return next;
}

inline Word crc_of_wide(Word crc, const Wide& wide) {
#if defined(JAXINF_CPU_INSTRUCTIONS) && defined(__SSE4_2__)
  for (int w = 0; w < 16; ++w) crc = _mm_crc32_u32(crc, wide.word[w]);
  return crc;
#else
  return crc_of_wide_by_rows(crc, wide);
#endif
}

// The same after `num_bytes` bytes, at most 64; each takes one cycle.
inline Word crc_of_bytes(Word crc, const Wide& wide, Word num_bytes) {
crc_tail:
  for (Word i = 0; i < num_bytes; ++i) {
#pragma HLS PIPELINE II=1
#pragma HLS LOOP_TRIPCOUNT min=0 max=63
    crc ^= item<1>(wide, i);
  crc_tail_bits:
    for (int bit = 0; bit < 8; ++bit) {
#pragma HLS UNROLL
      crc = crc_step(crc);
    }
  }
  return crc;
}

}  // namespace jaxinf
