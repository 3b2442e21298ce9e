// The host's loop around a kernel body.
//
//   memory ── widen to 32 bits ──► body, 8 elements at a time ── narrow ──► memory
//     └─ checksum    (only what is stored in fewer bits)            checksum ─┘
//
// Every chunk is cut into blocks that stay in the first-level cache. So the body is
// compiled once for all dtypes of gradient, state and result, and the work beside it finds
// the block in the cache.
#pragma once

#include "block_codec.hpp"
#include "codecs.hpp"
#include "crc32c.hpp"
#include "lanes.hpp"

namespace jaxinf {

constexpr long block_elements = 512;

enum Dtype : std::int32_t {
  float32, bfloat16, float16, int32, uint32, boolean, int8, uint8, int16, uint16,
  bfloat16_stochastic, int8_blocks, bfloat16_split
};
static_assert(block_elements % code_block == 0, "a block holds whole code blocks");

// `beside`: the scales of int8_blocks, the remainders of bfloat16_split. `key`: seed of
// the random bits for stochastic rounding. `first`: the first element's number in its
// chunk.
struct Array {
  void* data;
  void* beside;
  std::int32_t dtype;
  Word key, first;
};

// Work beside the update. The stored arrays are the params, then the slots; a coded state
// has its codes, then its array `beside`.
//   given         params that replace the stored ones, in their dtype; null for none
//   sums          CRC-32C of each stored array before, then of each after the update
//   wanted        for each of the sums, whether it is requested
//   wants_params  whether a float32 result receives the new params, not the update
struct Passage {
  const void* given;
  Word* sums;
  const std::uint8_t* wanted;
  std::int32_t wants_params;
};

inline long bytes_of(std::int32_t dtype, long num) {
  switch (dtype) {
    case float32: case int32: case uint32: return 4 * num;
    case bfloat16: case float16: case int16: case uint16: case bfloat16_stochastic:
    case bfloat16_split:
      return 2 * num;
    default: return num;
  }
}

inline int num_arrays_of(const Array& array) {
  return array.dtype == int8_blocks || array.dtype == bfloat16_split ? 2 : 1;
}

// ---- storage <-> 32-bit words; float16 is rounded to even

inline void widen_f16(const std::uint16_t* from, float* to, long num) {
  long i = 0;
  for (; i + lane_count <= num; i += lane_count)
    Lanes::store(to + i, widened_halves(from + i));
  for (; i < num; ++i) to[i] = float_of_half(from[i]);
}

inline void narrow_f16(const float* from, std::uint16_t* to, long num) {
  long i = 0;
  for (; i + lane_count <= num; i += lane_count)
    narrow_halves(Lanes::load(from + i), to + i);
  for (; i < num; ++i) to[i] = half_of_float(from[i]);
}

template <class T, class Function>
inline void words(const T* from, Word* to, long num, Function function) {
  for (long i = 0; i < num; ++i) to[i] = (Word)function(from[i]);
}

// Returns the address of `num` elements from `start` as 32-bit words.
inline Word* widened(const Array& array, long start, long num, Word* scratch) {
  switch (array.dtype) {
    case int8_blocks:
      decode_blocks((const std::uint8_t*)array.data, (const float*)array.beside, start,
                    num, (float*)scratch);
      return scratch;
    case bfloat16_split:
      decode_split((const std::uint16_t*)array.data + start,
                   (const std::uint16_t*)array.beside + start, num, scratch);
      return scratch;
    case bfloat16_stochastic:
    case bfloat16:
      words((const std::uint16_t*)array.data + start, scratch, num,
            [](Word x) { return x << 16; });
      return scratch;
    case float16:
      widen_f16((const std::uint16_t*)array.data + start, (float*)scratch, num);
      return scratch;
    case boolean:
      words((const std::uint8_t*)array.data + start, scratch, num,
            [](Word x) { return x ? ~0u : 0u; });
      return scratch;
#define JAXINF_INTEGER(dtype, type)                                              \
    case dtype:                                                                  \
      words((const type*)array.data + start, scratch, num,                       \
            [](std::int32_t x) { return x; });                                   \
      return scratch;
    JAXINF_INTEGER(int8, std::int8_t)
    JAXINF_INTEGER(uint8, std::uint8_t)
    JAXINF_INTEGER(int16, std::int16_t)
    JAXINF_INTEGER(uint16, std::uint16_t)
#undef JAXINF_INTEGER
    default:
      return (Word*)array.data + start;
  }
}

// Stores words that `widened` put into scratch; others are in place already.
inline void narrowed(const Array& array, long start, long num, const Word* from,
                     SideBySide& sums) {
  switch (array.dtype) {
    case int8_blocks:
      return encode_blocks((const float*)from, start, num, array.first, array.key,
                           (std::uint8_t*)array.data, (float*)array.beside, sums);
    case bfloat16_split:
      return encode_split(from, num, (std::uint16_t*)array.data + start,
                          (std::uint16_t*)array.beside + start);
    case bfloat16_stochastic:
      return encode_bf16(from, array.first + (Word)start, num, array.key,
                         (std::uint16_t*)array.data + start);
    case bfloat16: {
      std::uint16_t* to = (std::uint16_t*)array.data + start;
      for (long i = 0; i < num; ++i) to[i] = narrow_bf16(from[i]);
      return;
    }
    case float16:
      return narrow_f16((const float*)from, (std::uint16_t*)array.data + start, num);
    case boolean: {
      std::uint8_t* to = (std::uint8_t*)array.data + start;
      for (long i = 0; i < num; ++i) to[i] = from[i] & 1u;
      return;
    }
    case int8:
    case uint8: {
      std::uint8_t* to = (std::uint8_t*)array.data + start;
      for (long i = 0; i < num; ++i) to[i] = (std::uint8_t)from[i];
      return;
    }
    case int16:
    case uint16: {
      std::uint16_t* to = (std::uint16_t*)array.data + start;
      for (long i = 0; i < num; ++i) to[i] = (std::uint16_t)from[i];
      return;
    }
    default:
      return;
  }
}

// ---- one block

template <class Body>
struct Block {
  const float* gradient;
  float* params;
  float* update;
  float* slots[Body::num_slots + 1];
  const float* arrays[Body::num_arrays + 1];
};

// Updates the elements from `i`; sets bits of `bad` if the gradient is not finite.
template <class L, class Body>
JAXINF_INLINE void elements(const Body& body, const Block<Body>& block, long i,
                            typename L::I32& bad) {
  using F32 = typename L::F32;
  F32 slots[Body::num_slots + 1], arrays[Body::num_arrays + 1];
  F32 new_slots[Body::num_slots + 1], update = {};
  const F32 gradient = L::load(block.gradient + i);
  const F32 params = L::load(block.params + i);
  for (int k = 0; k < Body::num_slots; ++k) slots[k] = L::load(block.slots[k] + i);
  for (int k = 0; k < Body::num_arrays; ++k) arrays[k] = L::load(block.arrays[k] + i);
  body(L(), gradient, params, slots, arrays, update, new_slots);
  bad |= ~L::is_finite(gradient);
  for (int k = 0; k < Body::num_slots; ++k)
    if (Body::writes[k]) L::store(block.slots[k] + i, new_slots[k]);
  if (!Body::has_update) return;
  L::store(block.params + i, params + update);
  L::store(block.update + i, update);
}

// Updates the last elements in separate lanes, so as to touch no memory beyond them.
template <class L, class Body>
void remainder(const Body& body, const Block<Body>& block, long start, long num,
               typename L::I32& bad) {
  constexpr int rows = 3 + Body::num_slots + Body::num_arrays;
  float lanes[rows][L::size] = {};
  const size_t bytes = (size_t)(num - start) * sizeof(float);
  Block<Body> part;
  int row = 0;
  auto take = [&](const float* from) {
    std::memcpy(lanes[row], from + start, bytes);
    return lanes[row++];
  };
  part.gradient = take(block.gradient);
  part.params = take(block.params);
  part.update = lanes[row++];
  for (int k = 0; k < Body::num_slots; ++k) part.slots[k] = take(block.slots[k]);
  for (int k = 0; k < Body::num_arrays; ++k) part.arrays[k] = take(block.arrays[k]);
  elements<L>(body, part, 0, bad);
  for (int k = 0; k < Body::num_slots; ++k)
    if (Body::writes[k]) std::memcpy(block.slots[k] + start, part.slots[k], bytes);
  if (!Body::has_update) return;
  std::memcpy(block.params + start, part.params, bytes);
  std::memcpy(block.update + start, part.update, bytes);
}

// Finds what a block of the stored arrays adds to the sums that are wanted; returns the
// number of spans. `params_block`: the params of this block, which may not be in the array.
template <int num_slots>
inline int find_spans(const Array& params, const void* params_block, const Array* slots,
                      long start, long length, Sum* sums, const std::uint8_t* wanted,
                      Span* spans) {
  int number = 0, num = 0;
  auto take = [&](const void* data, long offset, long num_bytes) {
    if (wanted[number])
      spans[num++] = {(const std::uint8_t*)data + offset, num_bytes, sums + number};
    ++number;
  };
  auto take_beside = [&](const Array& array) {
    const std::int32_t dtype = array.dtype;
    if (dtype == int8_blocks)
      take(array.beside, start / code_block * 4,
           (length + code_block - 1) / code_block * 4);
    if (dtype == bfloat16_split)
      take(array.beside, bytes_of(dtype, start), bytes_of(dtype, length));
  };
  take(params_block, 0, bytes_of(params.dtype, length));
  take_beside(params);
  for (int k = 0; k < num_slots; ++k) {
    const std::int32_t dtype = slots[k].dtype;
    take(slots[k].data, bytes_of(dtype, start), bytes_of(dtype, length));
    take_beside(slots[k]);
  }
  return num;
}

// Adds a block of the stored arrays to their sums. `params_block`: the params of this
// block, which may not be in the array yet.
template <int num_slots>
inline void add_block(const Array& params, const void* params_block, const Array* slots,
                      long start, long length, Sum* sums, const std::uint8_t* wanted) {
  Span spans[2 + 2 * num_slots];
  const int num = find_spans<num_slots>(params, params_block, slots, start, length, sums,
                                        wanted, spans);
  add_to_sums(spans, num);
}

// ---- one chunk

// Results of longer chunks leave the caches before anyone reads them.
constexpr long streamed_elements = 1 << 15;

// Stores past the caches, which would first fetch the lines to be overwritten.
inline void stream(float* to, const float* from, long num) {
  const long before = (long)(-(std::uintptr_t)to % 32 / sizeof(float));
  long i = before < num ? before : num;
  std::memcpy(to, from, (size_t)i * sizeof(float));
  for (; i + lane_count <= num; i += lane_count)
    store_past_caches(Lanes::load(from + i), to + i);
  std::memcpy(to + i, from + i, (size_t)(num - i) * sizeof(float));
}

// Not inlined: no part of it may move out of the flush-to-zero section.
template <class L, template <class> class Kernel>
__attribute__((noinline)) bool chunk(long num, const Array& gradient,
                                     const Array& params, const Array& out,
                                     const Array* slots, const Array* arrays,
                                     const Word* scalars, const Word* constants,
                                     const Passage& passage) {
  using Body = Kernel<L>;
  const Body body(L(), constants, scalars);
  // The params of the block before, too, while its sums go on.
  alignas(64) Word scratch[4 + Body::num_slots + Body::num_arrays][block_elements];
  int num_stored = num_arrays_of(params);
  for (int k = 0; k < Body::num_slots; ++k) num_stored += num_arrays_of(slots[k]);
  const std::uint8_t* const wanted_after = passage.wanted + num_stored;
  bool sums_before = false, sums_after = false;
  for (int k = 0; k < num_stored; ++k) {
    sums_before |= passage.wanted[k];
    sums_after |= wanted_after[k];
  }
  Sum sums[2][2 + 2 * Body::num_slots];  // before and after
  const bool is_long = num >= streamed_elements;
  const bool has_out = out.data;
  const bool streams_out = has_out && is_long && out.dtype == float32;
  const bool streams_params =
      is_long && passage.given && params.dtype == float32 && Body::has_update;
  // Sums of the blocks before and after go on beside this block's codes: there the vector
  // units are the limit. Registers of 64 bytes fold faster.
  bool sums_beside = false;
  for (int k = 0; k < Body::num_slots; ++k)
    sums_beside |= has_crc && !folds.faster_than_three && slots[k].dtype == int8_blocks;
  SideBySide beside;
  const auto length_at = [&](long start) {
    return num - start < block_elements ? num - start : block_elements;
  };
  const auto add_beside = [&](bool is_after, long start, const void* params_block) {
    if (!(is_after ? sums_after : sums_before)) return;
    Span spans[2 + 2 * Body::num_slots];
    const int num_spans = find_spans<Body::num_slots>(
        params, params_block, slots, start, length_at(start), sums[is_after],
        is_after ? wanted_after : passage.wanted, spans);
    for (int k = 0; k < num_spans; ++k) beside.add(spans[k]);
  };
  const void* last_params = nullptr;  // of the block before
  typename L::I32 bad = {};
  for (long start = 0; start < num; start += block_elements) {
    const long length = length_at(start), next = start + block_elements;
    const size_t num_bytes = (size_t)length * sizeof(float);
    const long offset = bytes_of(params.dtype, start);
    Word* const params_copy = scratch[sums_beside && start / block_elements % 2];
    void* const params_block =
        streams_params ? (void*)params_copy : (std::uint8_t*)params.data + offset;
    Word(*free)[block_elements] = scratch + 2;
    const auto read_params = [&](long at) {
      const void* const from = passage.given ? passage.given : params.data;
      return (const std::uint8_t*)from + bytes_of(params.dtype, at);
    };
    if (passage.given)
      std::memcpy(params_block, read_params(start),
                  (size_t)bytes_of(params.dtype, length));
    if (sums_beside) {
      if (!start) add_beside(false, start, params_block);
      beside.finish();
      if (start) add_beside(true, start - block_elements, last_params);
      if (next < num) add_beside(false, next, read_params(next));
      last_params = params_block;
    } else if (sums_before) {
      add_block<Body::num_slots>(params, params_block, slots, start, length, sums[0],
                                 passage.wanted);
    }
    Block<Body> block;
    block.gradient = (const float*)widened(gradient, start, length, *free++);
    block.params = streams_params ? (float*)params_block
                                  : (float*)widened(params, start, length, params_copy);
    const bool is_in_place = has_out && out.dtype == float32 && !streams_out;
    block.update = is_in_place ? (float*)out.data + start : (float*)*free;
    ++free;
    for (int k = 0; k < Body::num_slots; ++k)
      block.slots[k] = (float*)widened(slots[k], start, length, *free++);
    for (int k = 0; k < Body::num_arrays; ++k)
      block.arrays[k] = (const float*)widened(arrays[k], start, length, *free++);

    long i = 0;
    for (; i + L::size <= length; i += L::size) elements<L>(body, block, i, bad);
    if (i < length) remainder<L>(body, block, i, length, bad);

    for (int k = 0; k < Body::num_slots; ++k)
      if (Body::writes[k])
        narrowed(slots[k], start, length, (const Word*)block.slots[k], beside);
    if (Body::has_update)
      narrowed(params, start, length, (const Word*)block.params, beside);
    if (!has_out) {
    } else if (params.dtype != float32 && out.dtype != float32)  // the result is the codes
      std::memcpy((std::uint16_t*)out.data + start,
                  (const std::uint16_t*)params.data + start,
                  (size_t)length * sizeof(std::uint16_t));
    else if (out.dtype != float32)
      narrowed(out, start, length, (const Word*)block.params, beside);
    else if (passage.wants_params)
      std::memcpy(block.update, block.params, num_bytes);
    else if (!Body::has_update)
      std::memset(block.update, 0, num_bytes);
    if (streams_out) stream((float*)out.data + start, block.update, length);
    if (streams_params) stream((float*)params.data + start, block.params, length);
    if (sums_beside) {
      beside.finish();
      if (next >= num) add_beside(true, start, params_block);
    } else if (sums_after) {
      add_block<Body::num_slots>(params, params_block, slots, start, length, sums[1],
                                 wanted_after);
    }
  }
  beside.finish();
  order_stores();
  for (int k = 0; k < 2 * num_stored; ++k)
    passage.sums[k] = finished(sums[k / num_stored][k % num_stored]);
  Word any = 0;
  for (int i = 0; i < L::size; ++i) any |= (Word)bad[i];
  return any == 0;
}

#ifndef JAXINF_ENTRY
#define JAXINF_ENTRY jaxinf_entry
#endif

// The entry point. It returns 1 if the gradient is finite, else 0.
#define JAXINF_HOST_KERNEL(Body)                                                      \
  extern "C" __attribute__((visibility("default"))) int JAXINF_ENTRY(                 \
      long num, const jaxinf::Array* gradient, const jaxinf::Array* params,           \
      const jaxinf::Array* out, const jaxinf::Array* slots,                           \
      const jaxinf::Array* arrays, const jaxinf::Word* scalars,                       \
      const jaxinf::Word* constants, const jaxinf::Passage* passage) {                \
    const jaxinf::FlushToZero section;                                                \
    return jaxinf::chunk<jaxinf::Lanes, Body>(num, *gradient, *params, *out, slots,   \
                                              arrays, scalars, constants, *passage);  \
  }

}  // namespace jaxinf
