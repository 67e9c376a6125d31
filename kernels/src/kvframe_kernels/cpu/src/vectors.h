// Vectors of floats as wide as the machine's, by the vector extensions of GCC and Clang, and by intrinsics if these are
// better. All other files of this folder are written in terms of `Vec`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define KVFRAME_AVX512 1
#endif

namespace kvframe {

#if defined(KVFRAME_AVX512)
constexpr int kLanes = 16;
// A product's tile in registers: rows, and vectors per row.
constexpr int kTileRows = 6, kTileVecs = 4;
#elif defined(__AVX2__) && defined(__FMA__)
#define KVFRAME_AVX2 1
constexpr int kLanes = 8;
constexpr int kTileRows = 6, kTileVecs = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kTileRows = 6, kTileVecs = 4;
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 4, kTileVecs = 2;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f;

constexpr int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

inline Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }
inline void store(float* to, Vec vec) { *reinterpret_cast<LooseVec*>(to) = vec; }

inline Vec all(float value) {
#if defined(KVFRAME_AVX512)
  return (Vec)_mm512_set1_ps(value);
#elif defined(KVFRAME_AVX2)
  return (Vec)_mm256_set1_ps(value);
#else
  return Vec{value, value, value, value};
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(KVFRAME_AVX512)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(KVFRAME_AVX2)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// If `b` is NaN, so is the result.
inline Vec max(Vec a, Vec b) {
#if defined(KVFRAME_AVX512)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(KVFRAME_AVX2)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline Vec choose(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }

inline float sum(Vec vec) {
#if defined(KVFRAME_AVX512)
  return _mm512_reduce_add_ps((__m512)vec);
#else
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += vec[i];
  return total;
#endif
}

inline float largest(Vec vec) {
#if defined(KVFRAME_AVX512)
  return _mm512_reduce_max_ps((__m512)vec);
#else
  float found = vec[0];
  for (int i = 1; i < kLanes; i++) found = vec[i] > found ? vec[i] : found;
  return found;
#endif
}

inline IntVec lane_numbers() {
  IntVec numbers;
  for (int i = 0; i < kLanes; i++) numbers[i] = i;
  return numbers;
}

// 2 to the power of `x`, for x up to 127, within 1e-7 of it; 0 below -126 or so, and for minus infinity. NaN stays NaN.
// A polynomial of degree 5 over [-1/2, 1/2], fitted for the least relative error (Remez).
inline Vec exp2(Vec x) {
  constexpr float c0 = 1.0000001192092896f, c1 = 0.6931469440460205f, c2 = 0.24022120237350464f;
  constexpr float c3 = 0.05550713464617729f, c4 = 0.009675540961325169f, c5 = 0.0013276460813358426f;
#if defined(KVFRAME_AVX512)
  __m512 y = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec rest = (Vec)_mm512_sub_ps(y, whole);
  Vec power = fma(fma(fma(fma(fma(all(c5), rest, all(c4)), rest, all(c3)), rest, all(c2)), rest, all(c1)), rest, all(c0));
  return (Vec)_mm512_scalef_ps((__m512)power, whole);
#else
  Vec y = max(all(-200.0f), x);
  Vec shifted = max(all(-126.0f), y);
  // Adding 1.5 * 2^23 rounds to whole numbers, which are then in the low bits.
  Vec magic = all(12582912.0f);
  Vec moved = shifted + magic;
  Vec rest = shifted - (moved - magic);
  Vec power = fma(fma(fma(fma(fma(all(c5), rest, all(c4)), rest, all(c3)), rest, all(c2)), rest, all(c1)), rest, all(c0));
  IntVec exponent = ((IntVec)moved - (IntVec)magic) << 23;
  Vec result = (Vec)((IntVec)power + exponent);
  return choose(y < all(-126.0f), all(0.0f), choose(x != x, x, result));
#endif
}

inline float exp2(float x) { return x == kMinusInfinity ? 0.0f : std::exp2(x); }

inline Vec tanh(Vec x) {
  // 1 - 2 / (e^2x + 1), with x small enough that the power is finite.
  Vec bounded = choose(x > all(20.0f), all(20.0f), choose(x < all(-20.0f), all(-20.0f), x));
  Vec power = exp2(bounded * all(2 * kLog2e));
  return all(1.0f) - all(2.0f) / (power + all(1.0f));
}

}  // namespace kvframe
