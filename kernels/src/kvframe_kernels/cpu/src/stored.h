// Stored numbers, read as floats. Each type reads `kLanes` elements of a row of `size` from element `i` on, or the `count`
// that remain, padded with zeros. The caller multiplies the numbers of a scaled type by their row's scale.
#pragma once

#include "vectors.h"

namespace kvframe {

// Prefetches the memory at an address.
__attribute__((always_inline)) inline void fetch(const char* from) { __builtin_prefetch(from, 0, 3); }

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
  // IEEE 754 binary16: the exponent's bias differs by 112, and the product is right for numbers below 2^-14 too.
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
  // Below 2^-14 the steps are 2^-24: adding 1/2 lets the float addition round to them.
  if (bits < 0x38800000u) return (uint16_t)(sign | (to_bits(from_bits(bits) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - 0x1c000u);
#endif
}

inline uint16_t bfloat_of_float(float value) {
  uint32_t bits = to_bits(value);
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return (uint16_t)((is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The first `count` elements of a vector, copied byte by byte.
template <class Stored>
inline Vec load_few(const char* row, int i, int count, int size = 0) {
  alignas(64) float values[kLanes] = {};
  for (int j = 0; j < count; j++) values[j] = Stored::element(row, i + j, size);
  return load(values);
}

struct Float32 {
  static constexpr bool kScaled = false;
  static constexpr int kBytes = 4;
  static float element(const char* row, int i, int = 0) {
    float value;
    std::memcpy(&value, row + 4 * i, 4);
    return value;
  }
  static Vec full(const char* row, int i, int = 0) { return *reinterpret_cast<const LooseVec*>(row + 4 * i); }
  static Vec few(const char* row, int i, int count, int = 0) {
#if defined(KVFRAME_AVX512)
    return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), row + 4 * i);
#else
    return load_few<Float32>(row, i, count);
#endif
  }
  static void put(char* row, int i, float value) { std::memcpy(row + 4 * i, &value, 4); }
};

struct BFloat16 {
  static constexpr bool kScaled = false;
  static constexpr int kBytes = 2;
  static float element(const char* row, int i, int = 0) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * i, 2);
    return from_bits((uint32_t)bits << 16);
  }
  static Vec full(const char* row, int i, int = 0) {
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
  static Vec few(const char* row, int i, int count, int = 0) {
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
  static constexpr bool kScaled = false;
  static constexpr int kBytes = 2;
  static float element(const char* row, int i, int = 0) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * i, 2);
    return float_of_half(bits);
  }
  static Vec full(const char* row, int i, int = 0) {
#if defined(KVFRAME_AVX512)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i)));
#elif defined(KVFRAME_AVX2) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i)));
#else
    return load_few<Float16>(row, i, kLanes);
#endif
  }
  static Vec few(const char* row, int i, int count, int = 0) {
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

// Eight-bit floats with four bits of exponent (arXiv 2209.05433): a half's bits, with an exponent that is 8 too low.
struct Float8 {
  static constexpr bool kScaled = true;
  static constexpr int kBytes = 1;
  static float element(const char* row, int i, int = 0) {
    unsigned code = (unsigned char)row[i];
    if ((code & 0x7fu) == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
    return float_of_half((uint16_t)((code & 0x80u) << 8 | (code & 0x7fu) << 7)) * 256.0f;
  }
#if defined(KVFRAME_AVX512)
  static Vec of(__m128i codes) {
    __m256i wide = _mm256_cvtepu8_epi16(codes), number = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    __mmask16 nan = _mm256_cmpeq_epi16_mask(number, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    __m256i half = _mm256_mask_mov_epi16(_mm256_slli_epi16(number, 7), nan, _mm256_set1_epi16(0x7e00));
    return (Vec)_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, sign)), _mm512_set1_ps(256.0f));
  }
  static Vec full(const char* row, int i, int = 0) {
    return of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i)));
  }
  static Vec few(const char* row, int i, int count, int = 0) {
    return of(_mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), row + i));
  }
#else
  static Vec full(const char* row, int i, int = 0) { return load_few<Float8>(row, i, kLanes); }
  static Vec few(const char* row, int i, int count, int = 0) { return load_few<Float8>(row, i, count); }
#endif
};

struct Int8 {
  static constexpr bool kScaled = true;
  static constexpr int kBytes = 1;
  static float element(const char* row, int i, int = 0) { return (float)(signed char)row[i]; }
  static Vec full(const char* row, int i, int = 0) {
#if defined(KVFRAME_AVX512)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i))));
#elif defined(KVFRAME_AVX2)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i))));
#else
    return load_few<Int8>(row, i, kLanes);
#endif
  }
  static Vec few(const char* row, int i, int count, int = 0) {
#if defined(KVFRAME_AVX512)
    __m128i codes = _mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), row + i);
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#else
    return load_few<Int8>(row, i, count);
#endif
  }
};

// Four bits an element: byte j has element j in its low half and element j + size / 2 in its high half.
struct Nibble {
  static constexpr bool kScaled = true;
  static constexpr int kBytes = 1;  // at most
  static float element(const char* row, int i, int size) {
    int half = size / 2;
    return i < half ? (float)((unsigned char)row[i] & 15) : (float)((unsigned char)row[i - half] >> 4);
  }
  static Vec full(const char* row, int i, int size) {
#if defined(KVFRAME_AVX512)
    int half = size / 2;
    if (i + kLanes <= half) return of(row + i, 0);
    if (i >= half) return of(row + i - half, 4);
#endif
    return load_few<Nibble>(row, i, kLanes, size);
  }
  static Vec few(const char* row, int i, int count, int size) { return load_few<Nibble>(row, i, count, size); }

#if defined(KVFRAME_AVX512)
 private:
  static Vec of(const char* from, int shift) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    codes = _mm512_and_si512(_mm512_srl_epi32(codes, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(15));
    return (Vec)_mm512_cvtepi32_ps(codes);
  }
#endif
};

}  // namespace kvframe
