// The two products of a decode, for a few rows of queries and a few tokens in their pages. Sums stay in registers; each
// key is read once for several queries, and each query once for several keys. Memory for later tokens is prefetched
// meanwhile, evenly spread, because the processor's queue holds few requests.
#pragma once

#include "operands.h"

namespace kvframe {

#if defined(KVFRAME_AVX512)
constexpr int kTileSums = 16;  // products of a tile: rows times tokens
constexpr int kValueVecs = 4;  // vectors of a row of values whose sums are in registers
#else
constexpr int kTileSums = 8;
constexpr int kValueVecs = 2;
#endif

#if defined(KVFRAME_AVX512)
// The sums of sixteen vectors, each in the lane of its index.
__attribute__((always_inline)) inline __m512 sums_of_sixteen(const __m512* v) {
  __m512 pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  __m512 left = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  __m512 right = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(left, right, 0x88), _mm512_shuffle_f32x4(left, right, 0xdd));
}
#endif

// A vector that stays in a register: otherwise compilers load it again for each use, and a core loads two at a time.
__attribute__((always_inline)) inline Vec keep(Vec vec) {
#if defined(KVFRAME_AVX512)
  asm("" : "+v"(vec));
#endif
  return vec;
}

// Calls `tile` with the size of a head: as a constant if it is the usual one and `kConstant`, for shorter code.
template <bool kConstant, class Tile>
inline void with_size(int64_t size, Tile tile) {
  if constexpr (kConstant) {
    if (size == 128) return tile(std::integral_constant<int, 128>());
  }
  tile((int)size);
}

// scores[t * stride + r]: the product of the query in row r with the key of token t, at `offset` bytes after keys[t]. The
// queries' first vectors are adjacent, then their second ones, and so on. Meanwhile the same bytes of the tokens `later`
// are prefetched.
template <class Keys, int kRows, class Size>
inline void multiply_tile(const float* queries, const char* const* keys, const char* const* later, int64_t offset,
                          Size head_size, float* scores, int stride) {
  const int size = head_size;
  constexpr int kTokens = kTileSums / kRows, kVecs = Keys::kVecs;
  Vec sums[kTileSums] = {};
  const char *mine[kTokens], *fetched[kTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; t++) mine[t] = keys[t] + offset, fetched[t] = later[t] + offset;
  auto add_unit = [&](auto read) __attribute__((always_inline)) {
    Vec query[kVecs * kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kVecs * kRows; i++) query[i] = keep(load(queries + i * kLanes));
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; t++) {
      Vec key[kVecs];
      read(mine[t], key);
#pragma GCC unroll 16
      for (int i = 0; i < kVecs * kRows; i++) {
        Vec& sum = sums[t * kRows + i % kRows];
        sum = Keys::multiply_add(query[i], key[i / kRows], sum);
      }
    }
    queries += kVecs * kRows * kLanes;
  };
  int at = 0;
#pragma GCC unroll 1
  for (; at + Keys::kElements <= size; at += Keys::kElements) {
    if (Keys::bytes(Keys::kElements) >= 64 || Keys::bytes(at) % 64 == 0) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; t++) fetch(fetched[t] + Keys::bytes(at));
    }
    add_unit([&](const char* row, Vec* key) __attribute__((always_inline)) { Keys::read(row, at, size, key); });
  }
#pragma GCC unroll 1
  for (; at < size; at += Keys::kElements) {
    add_unit([&](const char* row, Vec* key) __attribute__((always_inline)) { Keys::read_few(row, at, size, key); });
  }
  alignas(64) float products[kTileSums];
#if defined(KVFRAME_AVX512)
  _mm512_store_ps(products, sums_of_sixteen(reinterpret_cast<const __m512*>(sums)));
#else
  for (int i = 0; i < kTileSums; i++) products[i] = sum(sums[i]);
#endif
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; t++) std::memcpy(scores + t * stride, products + t * kRows, sizeof(float) * kRows);
}

// For `kVecs` vectors of each row of outputs from place `at` of the values' order on; all vectors exist if `kWhole`.
template <class Values, int kRows, int kVecs, int kCount, bool kWhole>
__attribute__((always_inline)) inline void add_part(const float* weights, int weight_stride, const float* shrinks,
                                                    const char* const* values, const char* const* later, int at, int size,
                                                    float* const* outputs) {
  constexpr int kLines = (Values::bytes(kVecs * kLanes) + 63) / 64;
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; j++) sums[r][j] = load(outputs[r] + at + j * kLanes) * all(shrinks[r]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < kCount; t++) {
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; j += Values::kVecs) {
      if constexpr (kWhole) {
        Values::read(values[t], at + j * kLanes, size, value + j);
      } else {
        Values::read_few(values[t], at + j * kLanes, size, value + j);
      }
    }
#pragma GCC unroll 4
    for (int line = 0; line < kLines; line++) fetch(later[t] + Values::bytes(at) + 64 * line);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      Vec weight = all(weights[t * weight_stride + r]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) sums[r][j] = fma(weight, value[j], sums[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; j++) store(outputs[r] + at + j * kLanes, sums[r][j]);
  }
}

// outputs[r] = outputs[r] * shrinks[r] + the sum over kCount tokens of weights[t][r] * value, which is at `offset` bytes
// after values[t]. Meanwhile the same bytes of the tokens `later` are prefetched.
template <class Values, int kRows, int kCount, class Size>
inline void add_tile(const float* weights, int weight_stride, const float* shrinks, const char* const* values,
                     const char* const* later, int64_t offset, Size head_size, float* outputs, int stride) {
  const int size = head_size;
  const char *mine[kCount], *fetched[kCount];
  float* rows[kRows];
#pragma GCC unroll 8
  for (int t = 0; t < kCount; t++) mine[t] = values[t] + offset, fetched[t] = later[t] + offset;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++) rows[r] = outputs + r * stride;
  int at = 0;
  // Single tokens are the last ones of a request, for which separate code does not pay.
  if constexpr (kCount > 1) {
#pragma GCC unroll 1
    for (; at + kValueVecs * kLanes <= size; at += kValueVecs * kLanes) {
      add_part<Values, kRows, kValueVecs, kCount, true>(weights, weight_stride, shrinks, mine, fetched, at, size, rows);
    }
  }
#pragma GCC unroll 1
  for (; at < size; at += Values::kElements) {
    add_part<Values, kRows, Values::kVecs, kCount, false>(weights, weight_stride, shrinks, mine, fetched, at, size, rows);
  }
}

}  // namespace kvframe
