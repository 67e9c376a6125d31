// Products of small packed matrices in the L1 cache, with the result in registers (the scheme of Goto and van de Geijn,
// 2008, without its outer loops: the caller divides the operands into tiles).
#pragma once

#include "vectors.h"

#if defined(KVFRAME_AVX512) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define KVFRAME_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvframe {

// Multiplies and adds floats: an element of the left operand is one float.
struct FloatProduct {
  static constexpr int kDepth = 1;
  // Results are computed for so many rows, in multiples of so many columns and steps of depth.
  static constexpr int kRows = kTileRows, kColumns = kLanes, kSteps = 1;
  static Vec multiply_add(const float* left, Vec right, Vec sum) { return fma(all(*left), right, sum); }
};

#if defined(KVFRAME_AVX512) && defined(__AVX512BF16__)
// The same for pairs of bfloat16 in the place of a float: two products at once, summed up in float.
struct PairProduct {
  static constexpr int kDepth = 2, kRows = kTileRows, kColumns = kLanes, kSteps = 1;
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

// The same for the product's rows and `columns` columns, a multiple of kLanes.
template <class Product>
inline void multiply_rows(const float* left, int left_stride, const float* right, int right_stride, int depth,
                          int columns, const float* scale, float* result, int result_stride) {
  constexpr int kRows = Product::kRows;
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

#if defined(KVFRAME_AMX)
// The same by the processor's matrix unit (Intel AMX), in blocks of 16 rows, 16 columns and 16 pairs. Operands are
// padded with zeros to whole blocks.
struct MatrixProduct {
  static constexpr int kBlock = 16, kDepth = 2, kRows = 2 * kBlock, kColumns = 2 * kBlock, kSteps = kBlock;

  // Whether the system lets this process use it: its registers are saved on request only.
  static bool is_permitted() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
  }

  // Gives all eight registers the shape of a block; other libraries leave them in shapes of their own.
  class Registers {
   public:
    Registers() {
      struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shapes;
      // The compiler does not know that all of it is read.
      asm volatile("" ::"r"(&shapes) : "memory");
      _tile_loadconfig(&shapes);
    }
    ~Registers() { _tile_release(); }
  };
};

// Two blocks of rows times one or two of columns: registers 0 to 3 are the results, 4 and 5 the left, 6 and 7 the right.
template <bool kTwo>
inline void multiply_blocks(const float* left, int left_stride, const float* right, int right_stride, int depth,
                            bool adds, float* result, int result_stride) {
  constexpr int kBlock = MatrixProduct::kBlock;
  const int64_t of_left = 4 * left_stride, of_right = 4 * right_stride, of_result = 4 * result_stride;
  float* below = result + kBlock * result_stride;
  // The compiler does not know that registers are loaded from memory.
  asm volatile("" ::: "memory");
  if (adds) {
    _tile_loadd(0, result, of_result);
    _tile_loadd(2, below, of_result);
    if (kTwo) _tile_loadd(1, result + kBlock, of_result);
    if (kTwo) _tile_loadd(3, below + kBlock, of_result);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < depth; k += kBlock) {
    const float* rows = right + (int64_t)k * right_stride;
    _tile_loadd(6, rows, of_right);
    _tile_loadd(4, left + k, of_left);
    _tile_loadd(5, left + k + kBlock * left_stride, of_left);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (kTwo) {
      _tile_loadd(7, rows + kBlock, of_right);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, result, of_result);
  _tile_stored(2, below, of_result);
  if (kTwo) _tile_stored(1, result + kBlock, of_result);
  if (kTwo) _tile_stored(3, below + kBlock, of_result);
}

// `depth` is a multiple of 16 pairs.
template <>
inline void multiply_rows<MatrixProduct>(const float* left, int left_stride, const float* right, int right_stride,
                                         int depth, int columns, const float* scale, float* result,
                                         int result_stride) {
  constexpr int kBlock = MatrixProduct::kBlock;
  for (int r = 0; scale && r < MatrixProduct::kRows; r++) {
    float* row = result + r * result_stride;
    for (int c = 0; c < columns; c += kLanes) store(row + c, load(row + c) * all(scale[r]));
  }
  int c = 0;
  for (; c + 2 * kBlock <= columns; c += 2 * kBlock) {
    multiply_blocks<true>(left, left_stride, right + c, right_stride, depth, scale, result + c, result_stride);
  }
  if (c < columns) {
    multiply_blocks<false>(left, left_stride, right + c, right_stride, depth, scale, result + c, result_stride);
  }
}
#endif


}  // namespace kvframe
