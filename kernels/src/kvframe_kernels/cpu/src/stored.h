// What a cache stores, read as floats. Each type reads `kLanes` elements of a row of `size` from element `i` on, or the
// `count` that are left of it, with zeros behind.
#pragma once

#include "vectors.h"

namespace kvframe {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of_half(uint16_t half) {
  // IEEE 754 binary16: the exponent's bias differs by 112, and numbers below 2^-14 come out right by the product.
  uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return from_bits(sign | to_bits(from_bits(rest << 13) * from_bits(0x77800000u)));
}

inline uint16_t half_of_float(float value) {
#if defined(__F16C__)
  return (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  // Below 2^-14 the steps are of 2^-24: adding 1/2 lets the float itself round to them.
  if (bits < 0x38800000u) return (uint16_t)(sign | (to_bits(from_bits(bits) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - 0x1c000u);
#endif
}

inline uint16_t bfloat_of_float(float value) {
  uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The first `count` elements of a vector, by a copy of their bytes.
template <class Stored>
inline Vec load_few(const char* row, int i, int count) {
  alignas(64) float values[kLanes] = {};
  for (int j = 0; j < count; j++) values[j] = Stored::element(row, i + j);
  return load(values);
}

struct Float32 {
  static constexpr int kBytes = 4;
  static float element(const char* row, int i) {
    float value;
    std::memcpy(&value, row + 4 * i, 4);
    return value;
  }
  static Vec full(const char* row, int i) { return *reinterpret_cast<const LooseVec*>(row + 4 * i); }
  static Vec few(const char* row, int i, int count) {
#if defined(KVFRAME_AVX512)
    return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), row + 4 * i);
#else
    return load_few<Float32>(row, i, count);
#endif
  }
  static void put(char* row, int i, float value) { std::memcpy(row + 4 * i, &value, 4); }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static float element(const char* row, int i) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * i, 2);
    return from_bits((uint32_t)bits << 16);
  }
  static Vec full(const char* row, int i) {
#if defined(KVFRAME_AVX512)
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i));
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(KVFRAME_AVX2)
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
    return load_few<BFloat16>(row, i, kLanes);
#endif
  }
  static Vec few(const char* row, int i, int count) {
#if defined(KVFRAME_AVX512)
    __m256i bits = _mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), row + 2 * i);
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
    return load_few<BFloat16>(row, i, count);
#endif
  }
  static void put(char* row, int i, float value) {
    uint16_t bits = bfloat_of_float(value);
    std::memcpy(row + 2 * i, &bits, 2);
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static float element(const char* row, int i) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * i, 2);
    return float_of_half(bits);
  }
  static Vec full(const char* row, int i) {
#if defined(KVFRAME_AVX512)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i)));
#elif defined(KVFRAME_AVX2) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i)));
#else
    return load_few<Float16>(row, i, kLanes);
#endif
  }
  static Vec few(const char* row, int i, int count) {
#if defined(KVFRAME_AVX512)
    return (Vec)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), row + 2 * i));
#else
    return load_few<Float16>(row, i, count);
#endif
  }
  static void put(char* row, int i, float value) {
    uint16_t bits = half_of_float(value);
    std::memcpy(row + 2 * i, &bits, 2);
  }
};

}  // namespace kvframe
