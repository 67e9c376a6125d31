// Products of small packed matrices in the L1 cache, with the result in registers (the scheme of Goto and van de Geijn,
// 2008, without its outer loops: the caller divides the operands into tiles).
#pragma once

#include "vectors.h"

namespace kvframe {

// Multiplies and adds floats: an element of the left operand is one float.
struct FloatProduct {
  static constexpr int kDepth = 1;
  static Vec multiply_add(const float* left, Vec right, Vec sum) { return fma(all(*left), right, sum); }
};

#if defined(KVFRAME_AVX512) && defined(__AVX512BF16__)
// The same for pairs of bfloat16 in the place of a float: two products at once, summed up in float.
struct PairProduct {
  static constexpr int kDepth = 2;
  static Vec multiply_add(const float* left, Vec right, Vec sum) {
    __m512 pair = _mm512_castsi512_ps(_mm512_set1_epi32((int)to_int(left)));
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)right);
  }

 private:
  static int32_t to_int(const float* from) {
    int32_t bits;
    std::memcpy(&bits, from, 4);
    return bits;
  }
};
#endif

// result[r][0 .. kVecs * kLanes) = scale[r] * result[r] + left[r] . right, or without the first term if `scale` is null.
template <class Product, int kRows, int kVecs>
inline void multiply_block(const float* left, int left_stride, const float* right, int right_stride, int depth,
                           const float* scale, float* result, int result_stride) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; c++) {
      sums[r][c] = scale ? load(result + r * result_stride + c * kLanes) * all(scale[r]) : Vec{};
    }
  }
#pragma GCC unroll 1
  for (int k = 0; k < depth; k++) {
    Vec columns[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; c++) columns[c] = load(right + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; c++) {
        sums[r][c] = Product::multiply_add(left + r * left_stride, columns[c], sums[r][c]);
      }
    }
    left++;
    right += right_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; c++) store(result + r * result_stride + c * kLanes, sums[r][c]);
  }
}

// The same for `columns` columns, a multiple of kLanes.
template <class Product, int kRows>
inline void multiply_rows(const float* left, int left_stride, const float* right, int right_stride, int depth,
                          int columns, const float* scale, float* result, int result_stride) {
  int c = 0;
#pragma GCC unroll 1
  for (; c + kTileVecs * kLanes <= columns; c += kTileVecs * kLanes) {
    multiply_block<Product, kRows, kTileVecs>(left, left_stride, right + c, right_stride, depth, scale, result + c,
                                              result_stride);
  }
#pragma GCC unroll 1
  for (; c < columns; c += kLanes) {
    multiply_block<Product, kRows, 1>(left, left_stride, right + c, right_stride, depth, scale, result + c,
                                      result_stride);
  }
}

}  // namespace kvframe
