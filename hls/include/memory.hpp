// Memory to stream and back: a reader and a writer a port, bursts of 64 bytes a cycle, and the CRC-32C
// of what passes. Checksums end with the last item; the bytes after it, up to a whole
// `Wide`, are read as they are and written as zeros.
#pragma once

#include "checksum.hpp"
#include "streams.hpp"

namespace jaxinf {

// The number of wides of a subgroup's items, and their checksum.
template <class Format>
struct Extent {
  static constexpr Word items_a_wide = 64 / Format::bytes;
  const Word items, wides, whole;

  explicit Extent(Word num_elements)
      : items(ceil_div(num_elements, Format::elements)),
        wides(ceil_div(items, items_a_wide)),
        whole(items / items_a_wide) {}

  Word last_bytes() const { return items % items_a_wide * Format::bytes; }
};

template <class Format>
void load(const Wide* from, Word num_elements, Wides& to) {
  const Extent<Format> extent(num_elements);
load_wides:
  for (Word i = 0; i < extent.wides; ++i) {
#pragma HLS PIPELINE II=1
    to.write(from[i]);
  }
}

template <class Format>
void load_checked(const Wide* from, Word num_elements, Wides& to, Words& checksum) {
  const Extent<Format> extent(num_elements);
  Word crc = ~0u;
  Wide last = zero_wide();
#pragma HLS ARRAY_PARTITION variable=last.word complete
load_checked_wides:
  for (Word i = 0; i < extent.wides; ++i) {
#pragma HLS PIPELINE II=1
    const Wide wide = from[i];
    to.write(wide);
    if (i < extent.whole)
      crc = crc_of_wide(crc, wide);
    else
      last = wide;
  }
  checksum.write(~crc_of_bytes(crc, last, extent.last_bytes()));
}

template <class Format>
void store(Wide* to, Word num_elements, Wides& from) {
  const Extent<Format> extent(num_elements);
store_wides:
  for (Word i = 0; i < extent.wides; ++i) {
#pragma HLS PIPELINE II=1
    to[i] = from.read();
  }
}

template <class Format>
void store_checked(Wide* to, Word num_elements, Wides& from, Words& checksum) {
  const Extent<Format> extent(num_elements);
  Word crc = ~0u;
  Wide last = zero_wide();
#pragma HLS ARRAY_PARTITION variable=last.word complete
store_checked_wides:
  for (Word i = 0; i < extent.wides; ++i) {
#pragma HLS PIPELINE II=1
    const Wide wide = from.read();
    to[i] = wide;
    if (i < extent.whole)
      crc = crc_of_wide(crc, wide);
    else
      last = wide;
  }
  checksum.write(~crc_of_bytes(crc, last, extent.last_bytes()));
}

}  // namespace jaxinf
