// Stored numbers as vectors for the decode kernel, in the order of elements that is cheapest to make. `read` reads
// `kElements` elements of a row, from place `at` of that order on, into `kVecs` vectors. `read_few` does so if fewer than
// that remain of `size`, padded with zeros. `bytes` returns the byte of a place, `element` its element. Queries are laid
// out in the order of keys, and sums of values are put back into their own order at the end. Codes are read unscaled:
// the sums are multiplied by the scales.
#pragma once

#include "stored.h"

namespace kvframe {

// The row's own order, for every stored type on every machine.
template <class Stored>
struct PlainOperand {
  static constexpr int kElements = kLanes, kVecs = 1;
  static constexpr int bytes(int at) { return Stored::kBytes * at; }
  static int element(int at, int) { return at; }
  static void read(const char* row, int at, int size, Vec* to) { to[0] = Stored::full(row, at, size); }
  static void read_few(const char* row, int at, int size, Vec* to) {
    to[0] = size - at >= kLanes ? Stored::full(row, at, size) : Stored::few(row, at, size - at, size);
  }
};

template <class Stored>
struct FloatOperand : PlainOperand<Stored> {};

#if defined(KVFRAME_AVX512)
// The `count` bytes at `from`, up to 64, padded with zeros.
inline __m512i load_bytes(const char* from, int count) {
  return _mm512_maskz_loadu_epi8(count >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << count) - 1, from);
}

// Pairs of bfloat16 numbers as floats: the even ones, then the odd ones. A float's upper half is a bfloat16.
inline void split_pairs(__m512i pairs, Vec* to) {
  to[0] = (Vec)_mm512_slli_epi32(pairs, 16);
  to[1] = (Vec)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u));
}

template <>
struct FloatOperand<BFloat16> {
  static constexpr int kElements = 32, kVecs = 2;
  static constexpr int bytes(int at) { return 2 * at; }
  static int element(int at, int) { return at / 32 * 32 + at % 16 * 2 + at % 32 / 16; }
  static void read(const char* row, int at, int, Vec* to) { split_pairs(_mm512_loadu_si512(row + 2 * at), to); }
  static void read_few(const char* row, int at, int size, Vec* to) {
    split_pairs(load_bytes(row + 2 * at, 2 * (size - at)), to);
  }
};

// Four bits an element: sixteen bytes are the elements `at / 2 …` in their low halves, and those half a row later.
template <>
struct FloatOperand<Nibble> {
  static constexpr int kElements = 32, kVecs = 2;
  static constexpr int bytes(int at) { return at / 2; }
  static int element(int at, int size) {
    int byte = at / 32 * 16 + at % 16;
    return byte >= size / 2 ? size : at % 32 < 16 ? byte : size / 2 + byte;
  }
  static void read(const char* row, int at, int, Vec* to) {
    look_up(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + at / 2)), to);
  }
  static void read_few(const char* row, int at, int size, Vec* to) {
    int left = std::min(16, (size - at) / 2);
    look_up(_mm_maskz_loadu_epi8((__mmask16)((1u << left) - 1), row + at / 2), to);
  }

 private:
  static void look_up(__m128i bytes, Vec* to) {
    // A look-up by the lowest four bits of each lane; the upper bits do not matter.
    __m512i wide = _mm512_cvtepu8_epi32(bytes);
    __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    to[0] = (Vec)_mm512_permutexvar_ps(wide, numbers);
    to[1] = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), numbers);
  }
};
#endif

#if defined(KVFRAME_AVX512) && defined(__AVX512VBMI__)
// The bfloat16 of each of the 128 eight-bit floats that are not negative, as lower and upper bytes. They are exact, since
// three bits after the point fit into seven, and all exponents into eight.
struct Float8Table {
  alignas(64) unsigned char low[128], high[128];
  Float8Table() {
    for (int code = 0; code < 128; code++) {
      char byte = (char)code;
      uint32_t bits = to_bits(Float8::element(&byte, 0));
      low[code] = (unsigned char)(bits >> 16), high[code] = (unsigned char)(bits >> 24);
    }
  }
};

inline const Float8Table kFloat8Table;

// Sixty-four eight-bit floats as two vectors of bfloat16: the first eight of each 16, and the others.
inline void widen_float8(__m512i codes, __m512i* to) {
  const Float8Table& table = kFloat8Table;
  // Looked up by the lowest seven bits; then the sign is put back.
  __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), codes, _mm512_load_si512(table.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), codes, _mm512_load_si512(table.high + 64));
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (codes & sign)
  to[0] = _mm512_unpacklo_epi8(low, high), to[1] = _mm512_unpackhi_epi8(low, high);
}

template <>
struct FloatOperand<Float8> {
  static constexpr int kElements = 64, kVecs = 4;
  static constexpr int bytes(int at) { return at; }
  static int element(int at, int) {
    int vec = at % 64 / 16, pair = at % 16;  // vec / 2: which half of each 16; vec % 2: even or odd
    return at / 64 * 64 + pair / 4 * 16 + vec / 2 * 8 + pair % 4 * 2 + vec % 2;
  }
  static void read(const char* row, int at, int, Vec* to) { widen(_mm512_loadu_si512(row + at), to); }
  static void read_few(const char* row, int at, int size, Vec* to) { widen(load_bytes(row + at, size - at), to); }

 private:
  static void widen(__m512i codes, Vec* to) {
    __m512i pairs[2];
    widen_float8(codes, pairs);
    split_pairs(pairs[0], to), split_pairs(pairs[1], to + 2);
  }
};
#endif

// Keys and queries as floats.
template <class Stored>
struct FloatKeys : FloatOperand<Stored> {
  static constexpr int kPerVec = kLanes;  // numbers of a vector
  static void put(float* to, const float* numbers) { store(to, load(numbers)); }
  static Vec multiply_add(Vec query, Vec key, Vec sum) { return fma(query, key, sum); }
};

#if defined(KVFRAME_AVX512) && defined(__AVX512BF16__)
// Keys and queries of bfloat16, two in the place of a float, multiplied and added in float.
template <class Stored>
struct PairKeys;

struct PairProducts {
  static constexpr int kPerVec = 2 * kLanes;
  static void put(float* to, const float* numbers) {
    store(to, (Vec)_mm512_cvtne2ps_pbh((__m512)load(numbers + kLanes), (__m512)load(numbers)));
  }
  static Vec multiply_add(Vec query, Vec key, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)query, (__m512bh)key);
  }
};

template <>
struct PairKeys<BFloat16> : PairProducts {
  static constexpr int kElements = 32, kVecs = 1;
  static constexpr int bytes(int at) { return 2 * at; }
  static int element(int at, int) { return at; }
  static void read(const char* row, int at, int, Vec* to) { to[0] = (Vec)_mm512_loadu_si512(row + 2 * at); }
  static void read_few(const char* row, int at, int size, Vec* to) {
    to[0] = (Vec)load_bytes(row + 2 * at, 2 * (size - at));
  }
};
#endif

}  // namespace kvframe
