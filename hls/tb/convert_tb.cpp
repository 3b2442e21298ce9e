// 16-bit numbers: every half and bfloat16 is converted and back, and numbers in between
// are rounded.
#include "check.hpp"
#include "convert.hpp"

#include <cmath>

using namespace jaxinf;

namespace {

double value_of_half(Word half) {
  const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25)
                               : std::ldexp(fraction, -24);
  return half & 0x8000u ? -size : size;
}

template <class Format>
void there_and_back(Word special) {
  for (Word bits = 0; bits < 1 << 16; ++bits) {
    const float wide = widen_item(Format(), bits);
    const Word back = narrow_item(Format(), wide);
    if ((bits & special) == special && (bits & (special ^ 0x7fffu)))
      CHECK(std::isnan(wide) && (back & special) == special, "NaN %04x", bits);
    else
      CHECK(back == bits, "%04x becomes %04x", bits, back);
  }
}

}  // namespace

int main() {
  there_and_back<F16>(0x7c00u);
  there_and_back<Bf16>(0x7f80u);
  for (Word bits = 0; bits < 1 << 16; ++bits)
    if ((bits & 0x7c00u) != 0x7c00u)
      CHECK(widen_item(F16(), bits) == value_of_half(bits), "half %04x", bits);

  // A number between two neighbours goes to the nearer one, a middle to the even one.
  for (Word low = 0; low < 0x7bffu; ++low) {
    const double a = value_of_half(low), b = value_of_half(low + 1);
    const float middle = static_cast<float>((a + b) / 2);
    const Word even = low & 1u ? low + 1 : low;
    CHECK(narrow_item(F16(), middle) == even, "the middle above %04x", low);
    const Word below = narrow_item(F16(), float_of(bits_of(middle) - 1));
    const Word above = narrow_item(F16(), float_of(bits_of(middle) + 1));
    CHECK(below == low && above == low + 1, "beside the middle above %04x", low);
    CHECK(narrow_item(F16(), -middle) == (even | 0x8000u), "negative %04x", low);
  }
  CHECK(narrow_item(F16(), 65519.996f) == 0x7bffu, "below the overflow");
  CHECK(narrow_item(F16(), 65520.0f) == 0x7c00u, "at the overflow");
  CHECK(narrow_item(F16(), 3e38f) == 0x7c00u, "far above it");
  CHECK(narrow_item(F16(), -1e-40f) == 0x8000u, "a denormal");
  std::printf("convert: every half and bfloat16, and the roundings between halves\n");
}
