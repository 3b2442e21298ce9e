// Runs recorded calls of kernels on another machine, and compares every byte.
//
//   driver LIBRARY CALLS     (tests/wheels/test_aarch64.py writes the calls)
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "shell.hpp"

namespace {

using jaxinf::Array;
using jaxinf::Passage;
using jaxinf::Word;
using Entry = int (*)(long, const Array*, const Array*, const Array*, const Array*,
                      const Array*, const Word*, const Word*, const Passage*);

struct Head {
  char symbol[64];
  std::int64_t num;
  std::int32_t num_slots, num_scalars, num_constants, num_sums, finite, padding;
};

struct Field {
  std::int32_t dtype;
  Word key, first, padding;
  std::int64_t data_bytes, beside_bytes;
};

constexpr int most_arrays = 16;

// The C library's memory, as nothing here needs that of C++. It is not freed.
template <class T>
T* read_many(FILE* file, size_t num) {
  T* const result = (T*)std::calloc(num + 1, sizeof(T));
  if (!result || std::fread(result, sizeof(T), num, file) != num) std::exit(3);
  return result;
}

// Runs the next call; returns whether every byte is as recorded.
bool matches(FILE* file, const Head& head, void* library) {
  const Entry entry = (Entry)dlsym(library, head.symbol);
  const int num_arrays = 3 + head.num_slots;
  if (!entry || num_arrays > most_arrays) std::exit(4);
  const Word* const scalars = read_many<Word>(file, (size_t)head.num_scalars);
  const Word* const constants = read_many<Word>(file, (size_t)head.num_constants);
  Array arrays[most_arrays];
  const char* expected[2 * most_arrays];
  size_t sizes[2 * most_arrays];
  for (int k = 0; k < num_arrays; ++k) {
    const Field field = *read_many<Field>(file, 1);
    const size_t data = (size_t)field.data_bytes, beside = (size_t)field.beside_bytes;
    arrays[k] = {nullptr, nullptr, field.dtype, field.key, field.first};
    arrays[k].data = read_many<char>(file, sizes[2 * k] = data);
    arrays[k].beside = read_many<char>(file, sizes[2 * k + 1] = beside);
    expected[2 * k] = read_many<char>(file, data);
    expected[2 * k + 1] = read_many<char>(file, beside);
  }
  const size_t num_sums = (size_t)head.num_sums;
  const Word* const sums = read_many<Word>(file, num_sums);
  Word* const own = (Word*)std::calloc(num_sums + 1, sizeof(Word));
  std::uint8_t* const wanted = (std::uint8_t*)std::calloc(num_sums + 1, 1);
  std::memset(wanted, 1, num_sums);
  const Passage passage = {nullptr, own, wanted, 0};
  const int finite = entry(head.num, &arrays[0], &arrays[1], &arrays[2], &arrays[3],
                           nullptr, scalars, constants, &passage);
  bool same = finite == head.finite && !std::memcmp(own, sums, num_sums * sizeof(Word));
  for (int k = 0; k < num_arrays; ++k) {
    same &= !std::memcmp(arrays[k].data, expected[2 * k], sizes[2 * k]);
    same &= !std::memcmp(arrays[k].beside, expected[2 * k + 1], sizes[2 * k + 1]);
  }
  return same;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  void* const library = dlopen(words[1], RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  FILE* const file = std::fopen(words[2], "rb");
  int num = 0, num_differing = 0;
  Head head;
  for (; file && std::fread(&head, 1, sizeof head, file) == sizeof head; ++num)
    if (!matches(file, head, library)) {
      std::printf("differs: call %d of %s\n", num, head.symbol);
      ++num_differing;
    }
  std::printf("%d calls, %d differ\n", num, num_differing);
  return num == 0 || num_differing != 0;
}
