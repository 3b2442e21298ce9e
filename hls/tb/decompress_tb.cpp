// The decompressor's scattered top-k pairs against a loop's, also for invalid pairs.
#include "check.hpp"
#include "decompress.hpp"
#include "memory.hpp"

#include <vector>

using namespace jaxinf;

namespace {

std::vector<Wide> wides_of(const std::vector<Word>& words) {
  std::vector<Wide> wides(words.size() / 16 + 1);
  for (std::size_t i = 0; i < words.size(); ++i) wides[i / 16].word[i % 16] = words[i];
  return wides;
}

void check(Word num, const std::vector<Word>& positions, bool expect_valid) {
  std::vector<Word> values;
  for (std::size_t i = 0; i < positions.size(); ++i)
    values.push_back(bits_of(1.0f + static_cast<float>(i)));
  const auto values_memory = wides_of(values), positions_memory = wides_of(positions);
  std::vector<Wide> result(num / 16 + 1);
  const Word count = static_cast<Word>(positions.size());
  Wides values_wides, positions_wides, result_wides;
  Beats beats;
  Words valid;
  csim::Region region;
  region.stage("values",
               [&] { load<F32>(values_memory.data(), count, values_wides); });
  region.stage("positions",
               [&] { load<Indices>(positions_memory.data(), count, positions_wides); });
  region.stage("decompress", [&] {
    decompress<F32>(values_wides, positions_wides, num, count, beats, valid);
  });
  region.stage("narrow", [&] { narrow<F32>(beats, num, result_wides); });
  region.stage("store", [&] { store<F32>(result.data(), num, result_wides); });
  region.run();
  CHECK((valid.read() == 1) == expect_valid, "%u elements, %u pairs", num, count);
  if (!expect_valid) return;
  std::vector<Word> dense(num, 0);
  for (Word i = 0; i < count; ++i) dense[positions[i]] = values[i];
  for (Word i = 0; i < num; ++i)
    CHECK(result[i / 16].word[i % 16] == dense[i], "element %u of %u", i, num);
}

}  // namespace

int main() {
  testbench::Random random(3);
  int checks = 0;
  for (Word num : {1u, 15u, 16u, 17u, 255u, 4096u, 4099u, 100000u})
    for (Word share : {0u, 1u, 10u, 50u, 100u}) {
      std::vector<Word> positions;
      for (Word i = 0; i < num; ++i)
        if (random.below(100) < share) positions.push_back(i);
      check(num, positions, true);
      ++checks;
    }
  check(100, {7, 7, 7, 80}, true);  // the last one is used
  check(100, {8, 7}, false);
  check(100, {50, 7, 80}, false);
  check(100, {7, 100, 101}, false);
  check(100, {0xffffffffu, 7}, false);
  std::printf("decompress: %d gradients, and positions that are wrong\n", checks);
}
