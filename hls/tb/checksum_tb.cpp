// CRC-32C of 64 bytes a cycle against one bit at a time, for every length up to 200.
#include "check.hpp"
#include "memory.hpp"

using namespace jaxinf;

namespace {

Word reference(const std::uint8_t* bytes, int num) {
  Word crc = ~0u;
  for (int i = 0; i < num; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc_step(crc);
  }
  return ~crc;
}

// The checksum of the same bytes by rows, and as `load_checked` computes it here.
void check_wide(const Wide& wide, Word crc) {
  const Word expected = crc_of_bytes(crc, wide, 64);
  CHECK(crc_of_wide_by_rows(crc, wide) == expected, "by rows, after %08x", crc);
  CHECK(crc_of_wide(crc, wide) == expected, "after %08x", crc);
}

// The bytes through a load and a store, as in a kernel.
void check(const Wide* from, Wide* to, Word num) {
  Wides stream;
  Words read, written;
  csim::Region region;
  region.stage("load", [&] { load_checked<Codes>(from, num, stream, read); });
  region.stage("store", [&] { store_checked<Codes>(to, num, stream, written); });
  region.run();
  const Word expected = reference(reinterpret_cast<const std::uint8_t*>(from), num);
  const Word found = read.read();
  CHECK(found == expected, "%u bytes: %08x, expected %08x", num, found, expected);
  CHECK(written.read() == expected, "%u bytes, written", num);
  for (Word i = 0; i < num; ++i)
    CHECK(item<1>(from[i / 64], i % 64) == item<1>(to[i / 64], i % 64), "byte %u", i);
}

}  // namespace

int main() {
  // The published check value of CRC-32C.
  const char digits[] = "123456789";
  CHECK(reference(reinterpret_cast<const std::uint8_t*>(digits), 9) == 0xe3069283u,
        "the reference is not CRC-32C");
  constexpr Word most = 200000;
  static Wide from[most / 64 + 1], to[most / 64 + 1];
  testbench::Random random(2);
  for (auto& wide : from)
    for (auto& word : wide.word) word = random.bits();
  for (const auto& wide : from) check_wide(wide, random.bits());
  for (Word num = 1; num <= 200; ++num) check(from, to, num);
  check(from, to, most);
  std::printf("checksum: lengths 1 to 200 and %u\n", most);
}
