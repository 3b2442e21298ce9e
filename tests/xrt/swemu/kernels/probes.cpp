// Kernels that show one property of the runtime each.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "words.hpp"

namespace {
void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }
}  // namespace

// output = factor * input + offset
extern "C" void scale(const float* input, float* output, Scalar num_elements,
                      Scalar factor, Scalar offset) {
  for (unsigned i = 0; i < num_elements; ++i)
    output[i] = from_bits<float>(factor) * input[i] +
                static_cast<float>(from_bits<int>(offset));
}

// Ends when `wanted` calls with the same counter have started, or the host says so.
extern "C" void meet(std::atomic<int>* counter, Scalar wanted) {
  counter->fetch_add(1);
  while (counter->load() < from_bits<int>(wanted)) pause();
}

// A kernel that crashes.
extern "C" void crash(int*) { std::abort(); }
