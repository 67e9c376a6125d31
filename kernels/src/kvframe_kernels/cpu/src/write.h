// Writes keys and values into their slots, in every format. It has the divisions and the rounding of the formats' own torch
// code, so that both write the same bits. The formats are described there: one scale for all, one for each token and head
// (LLM.int8, arXiv 2208.07339), four bits between extremes (KIVI, 2402.02750).
#pragma once

#include <atomic>
#include <vector>

#include "step.h"

namespace kvframe {

enum Format { kPlain, kFloat8Tensor, kFloat8Head, kInt8Head, kInt4Head };

// Keys or values, as Python fills them in (`write.py`). Strides of the target are in elements.
struct Side {
  const char* from;
  int64_t token_stride, head_stride, size, dtype;
  Plane codes, scales, mins;
  double scale;  // of kFloat8Tensor
};

struct Write {
  Side sides[2];
  const int64_t *blocks, *offsets;
  int64_t num_tokens, num_heads, format, num_threads;
};

// Rounds to whole numbers, ties to even, below 2^22: after adding 1.5 * 2^23, the unit of a float is 1.
inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

inline float between(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// The nearest eight-bit float, ties to even; too large numbers saturate, NaN stays NaN.
inline unsigned char float8_of_float(float x) {
  uint32_t bits = to_bits(x), size_bits = bits & 0x7fffffffu;
  bool is_nan = size_bits > 0x7f800000u;
  float size = from_bits(std::min(size_bits, 0x43e00000u));  // 448
  size_bits = to_bits(size);
  // Three of 23 bits after the point remain, and the exponent's bias is 7 instead of 127.
  uint32_t normal = ((size_bits + 0x7ffffu + (size_bits >> 20 & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the numbers are multiples of 2^-9, which is the unit of a float at 2^14.
  uint32_t small = to_bits(size + 16384.0f) - 0x46800000u;
  uint32_t code = is_nan ? 0x7fu : size < 0.015625f ? small : normal;
  return (unsigned char)(code | (bits >> 24 & 0x80u));
}

// The row of one token and head as floats, whether all are finite, and its extremes.
struct Row {
  float* values;
  bool is_finite;
  float low, high;
};

template <class Stored>
inline Row read_row(const char* from, int size, float* to) {
  Vec low = all(-kMinusInfinity), high = all(kMinusInfinity), nothing = {};
  for (int i = 0; i < size; i += kLanes) {
    int left = size - i;
    Vec values = left >= kLanes ? Stored::full(from, i, size) : Stored::few(from, i, left, size);
    store(to + i, values);
    // Zero for finite numbers, NaN for others.
    nothing += values - values;
    if (left < kLanes) values = choose(lane_numbers() < left, values, all(to[0]));
    low = -max(-low, -values), high = max(high, values);
  }
  return {to, sum(nothing) == 0, -largest(-low), largest(high)};
}

inline void put_half(const char* at, float value) { Float16::put(const_cast<char*>(at), 0, value); }

inline void write_codes(const Write& write, const Side& side, const Row& row, char* codes, char* scale_at, char* min_at) {
  int size = (int)side.size;
  const float* x = row.values;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (write.format == kFloat8Tensor) {
    float scale = (float)side.scale;
    for (int i = 0; i < size; i++) codes[i] = (char)float8_of_float(x[i] / scale);
  } else if (write.format == kInt4Head) {
    constexpr float kMost = 65504.0f;
    float low = float_of_half(half_of_float(between(row.low, -kMost, kMost)));
    float scale = std::max((between(row.high, -kMost, kMost) - low) / 15.0f, 0.0f);
    scale = float_of_half(half_of_float(scale));
    bool is_usable = row.is_finite && scale > 0;
    for (int i = 0; i < size / 2; i++) {
      float first = is_usable ? nearest(between((x[i] - low) / scale, 0, 15)) : 0;
      float second = is_usable ? nearest(between((x[size / 2 + i] - low) / scale, 0, 15)) : 0;
      codes[i] = (char)((int)first | (int)second << 4);
    }
    put_half(scale_at, row.is_finite ? scale : kNan);
    put_half(min_at, row.is_finite ? low : kNan);
  } else {
    float most = write.format == kInt8Head ? 127.0f : 448.0f, scale = std::max(std::fabs(row.low), std::fabs(row.high)) / most;
    bool is_usable = row.is_finite && scale > 0;
    if (!is_usable) {
      std::memset(codes, 0, size);
    } else if (write.format == kInt8Head) {
      for (int i = 0; i < size; i++) codes[i] = (char)(int)nearest(between(x[i] / scale, -most, most));
    } else {
      for (int i = 0; i < size; i++) codes[i] = (char)float8_of_float(x[i] / scale);
    }
    Float32::put(scale_at, 0, row.is_finite ? scale : kNan);
  }
}

inline void write_side(const Write& write, const Side& side, int64_t token, float* buffer) {
  int item = side.dtype == kFloat32 ? 4 : 2, size = (int)side.size;
  auto place = [&](const Plane& plane) {
    int64_t at = write.blocks[token] * plane.block_stride + write.offsets[token] * plane.token_stride;
    return plane.at ? const_cast<char*>(plane.at) + at : nullptr;
  };
  char *codes = place(side.codes), *scale = place(side.scales), *min = place(side.mins);
  const char* from = side.from + token * side.token_stride * item;
  for (int64_t head = 0; head < write.num_heads; head++, from += side.head_stride * item, codes += side.codes.head_stride) {
    if (write.format == kPlain) {
      std::memcpy(codes, from, (size_t)size * item);
      continue;
    }
    Row row = side.dtype == kFloat32    ? read_row<Float32>(from, size, buffer)
              : side.dtype == kBFloat16 ? read_row<BFloat16>(from, size, buffer)
                                        : read_row<Float16>(from, size, buffer);
    write_codes(write, side, row, codes, scale ? scale + head * side.scales.head_stride : nullptr,
                min ? min + head * side.mins.head_stride : nullptr);
  }
}

constexpr int kWriteTokens = 32;  // tokens that a thread takes at a time

struct WriteJob {
  const Write& write;
  std::atomic<int64_t> next{0};
};

inline void work_on_write(void* argument) {
  WriteJob& job = *static_cast<WriteJob*>(argument);
  const Write& write = job.write;
  std::vector<float> buffer(round_up((int)std::max(write.sides[0].size, write.sides[1].size), kLanes));
  for (int64_t start; (start = job.next.fetch_add(kWriteTokens, std::memory_order_relaxed)) < write.num_tokens;) {
    int64_t stop = std::min(start + kWriteTokens, write.num_tokens);
    for (const Side& side : write.sides) {
      for (int64_t token = start; token < stop; token++) write_side(write, side, token, buffer.data());
    }
  }
}

}  // namespace kvframe
