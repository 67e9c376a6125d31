// Tiles of queries of one KV head's group over tiles of keys: FlashAttention-2's loop (Dao, arXiv 2307.08691) on a CPU.
// A tile of keys is transposed and packed once for all queries of the tile. Then strips of a few rows go through product,
// softmax and product while they are in the L1 cache.
#pragma once

#include "product.h"
#include "scores.h"

namespace kvframe {

constexpr int kTileTokens = 64;  // keys of a tile
constexpr int kMaxTileRows = 256;  // queries times group

template <class Stored, class Product>
class Tiles {
 public:
  static constexpr int kDepth = Product::kDepth, kRows = Product::kRows, kColumns = Product::kColumns;
  static constexpr int kPartBytes = kDepth * Stored::kBytes;

  Tiles(const Step& step, Plan& plan, Scratch& scratch, const Part& part)
      : step_(step),
        plan_(plan),
        part_(part),
        unit_(plan.units[part.unit]),
        visible_(step, unit_.request),
        group_(step.group_size()),
        rows_(unit_.num_rows),
        size_((int)step.head_size),
        value_size_((int)step.head_size_v),
        depth_(round_up(size_, kLanes * kDepth) / kDepth),
        value_stride_(floats_of_row(step)) {
    int padded = round_up(rows_, kRows);
    scratch.reset();
    scratch.reserve((size_t)padded * (depth_ + value_stride_ + 2) + (size_t)kTileTokens * (depth_ + value_stride_) +
                    (size_t)kRows * (2 * kTileTokens) + 1024);
    queries_ = scratch.take((size_t)padded * depth_);
    outputs_ = scratch.take((size_t)padded * value_stride_);
    tops_ = scratch.take(padded);
    totals_ = scratch.take(padded);
    keys_ = scratch.take((size_t)kTileTokens * depth_);
    values_ = scratch.take((size_t)kTileTokens * value_stride_);
    scores_ = scratch.take((size_t)kRows * kTileTokens);
    weights_ = scratch.take((size_t)kRows * kTileTokens);
  }

  void run() {
    pack_queries();
    int padded = round_up(rows_, kRows);
    std::fill(outputs_, outputs_ + (size_t)padded * value_stride_, 0.0f);
    std::fill(tops_, tops_ + padded, kMinusInfinity);
    std::fill(totals_, totals_ + padded, 0.0f);
    Pages pages(step_, unit_.request);
    const Seen& seen = unit_.seen;
    for (int at = part_.keys.start; at < part_.keys.stop;) {
      int count = std::min({kTileTokens, part_.keys.stop - at, seen.stretch_end(at) - at});
      // The addresses of this tile's tokens and of the next tile's, which are prefetched while this tile is packed.
      const char *keys[2 * kTileTokens], *values[2 * kTileTokens];
      int known = std::min(2 * kTileTokens, part_.keys.stop - at);
      find(pages, at, known, step_.key, keys);
      find(pages, at, known, step_.value, values);
      for (int t = known; t < 2 * kTileTokens; t++) keys[t] = keys[known - 1], values[t] = values[known - 1];
      if constexpr (Stored::kScaled) {
        read_scales(pages, at, count, step_.key_scale, step_.key_min, key_scales_, key_lows_);
        read_scales(pages, at, count, step_.value_scale, step_.value_min, value_scales_, value_lows_);
      }
      pack_keys(keys, count);
      pack_values(values, count);
      for (int row = 0; row < rows_; row += kRows) strip(row, seen.position(at), count);
      at += count;
    }
    finish(step_, plan_, part_, tops_, totals_, outputs_);
  }

 private:
  void find(const Pages& pages, int at, int count, const Plane& plane, const char** found) {
    pages.find(unit_.seen, at, count, plane, found);
    for (int t = 0; t < count; t++) found[t] += unit_.kv_head * plane.head_stride;
  }

  void read_scales(const Pages& pages, int at, int count, const Plane& scale, const Plane& low, float* scales,
                   float* lows) {
    const char* found[kTileTokens];
    if (scale.at) find(pages, at, count, scale, found);
    for (int t = 0; t < count; t++) scales[t] = scale.at ? read_scale(step_, found[t]) : 1.0f;
    if (low.at) find(pages, at, count, low, found);
    for (int t = 0; t < count; t++) lows[t] = low.at ? read_scale(step_, found[t]) : 0.0f;
  }

  // The numbers of a row of codes from element `i` on.
  static Vec decode(const char* row, int i, int size, float scale, float low) {
    int left = size - i;
    if (left <= 0) return Vec{};
    Vec codes = left >= kLanes ? Stored::full(row, i, size) : Stored::few(row, i, left, size);
    if constexpr (!Stored::kScaled) return codes;
    Vec found = fma(codes, all(scale), all(low));
    return left >= kLanes ? found : choose(lane_numbers() < left, found, Vec{});
  }

  void pack_queries() {
    for (int row = 0; row < round_up(rows_, kRows); row++) {
      // Rows after the last one repeat it.
      Place place = place_of(step_, unit_, std::min(row, rows_ - 1));
      float* to = queries_ + (size_t)row * depth_;
      if constexpr (kDepth == 1) {
        read_query(step_, place.token, place.head, (float)step_.scale, depth_, to);
      } else {
        // The queries are bfloat16 and stay unscaled: the products are multiplied by the scale.
        int64_t from = place.token * step_.query_token_stride + place.head * step_.query_head_stride;
        std::memset(to, 0, 4 * depth_);
        std::memcpy(to, step_.query + 2 * from, 2 * size_);
      }
    }
  }

  // keys_[i][t]: element i (or pair i) of token t, padded with zeros after `count`.
  void pack_keys(const char* const* keys, int count) {
    for (int t = 0; t < kTileTokens; t += kLanes) {
      for (int i = 0; i < depth_; i += kLanes) {
        Vec block[kLanes];
        for (int j = 0; j < kLanes; j++) block[j] = t + j < count ? key_part(keys[t + j], i, t + j) : Vec{};
        if (i * kPartBytes % 64 == 0) {
          for (int j = 0; j < kLanes; j++) fetch(keys[kTileTokens + t + j] + i * kPartBytes);
        }
        transpose(block);
        for (int j = 0; j < kLanes; j++) store(keys_ + (size_t)(i + j) * kTileTokens + t, block[j]);
      }
    }
  }

  Vec key_part(const char* row, int i, int t) {
    if constexpr (kDepth == 1) {
      return decode(row, i, size_, key_scales_[t], key_lows_[t]);
    } else {
      int left = 4 * (size_ / 2 - i);
      if (left >= 4 * kLanes) {
        // A row of pairs lies at any even address.
        Vec pairs;
        std::memcpy(&pairs, row + 4 * i, sizeof pairs);
        return pairs;
      }
      return left > 0 ? Float32::few(row, i, left / 4) : Vec{};
    }
  }

  static void transpose(Vec* block) {
#if defined(KVFRAME_AVX512)
    __m512 *rows = reinterpret_cast<__m512*>(block), a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      for (int j = 0; j < 2; j++) {
        __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + 2 + j]);
        b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
      }
    }
    // b[4 * k + j], lane l: elements 4 * l + j of the rows 4 * k to 4 * k + 3.
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m512 p = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), q = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
      __m512 r = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), s = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
      rows[j] = _mm512_shuffle_f32x4(p, r, 0x88);
      rows[8 + j] = _mm512_shuffle_f32x4(p, r, 0xdd);
      rows[4 + j] = _mm512_shuffle_f32x4(q, s, 0x88);
      rows[12 + j] = _mm512_shuffle_f32x4(q, s, 0xdd);
    }
#else
    for (int i = 0; i < kLanes; i++) {
      for (int j = 0; j < i; j++) {
        float moved = block[i][j];
        block[i][j] = block[j][i];
        block[j][i] = moved;
      }
    }
#endif
  }

  // The rows of values_ that are multiplied for `count` tokens.
  static int steps_of(int count) { return round_up((count + kDepth - 1) / kDepth, Product::kSteps); }

  // values_[t][i], or [t / 2][i] for pairs of tokens; padded with zeros after `count`.
  void pack_values(const char* const* values, int count) {
    size_t first = count / kDepth, stop = steps_of(count);
    std::fill(values_ + first * value_stride_, values_ + stop * value_stride_, 0.0f);
    for (int t = 0; t < count; t += kDepth) {
      float* to = values_ + (size_t)(t / kDepth) * value_stride_;
      for (int i = 0; i < value_size_; i += kLanes) {
        int left = std::min(kLanes, value_size_ - i);
        for (int j = 0; j < kDepth; j++) {
          if (i * Stored::kBytes % 64 == 0) fetch(values[kTileTokens + t + j] + i * Stored::kBytes);
        }
        if constexpr (kDepth == 1) {
          store(to + i, decode(values[t], i, value_size_, value_scales_[t], value_lows_[t]));
        } else {
#if defined(KVFRAME_AVX512)
          __mmask16 mask = (__mmask16)((1u << left) - 1);
          __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values[t] + 2 * i)), high = {};
          if (t + 1 < count) high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values[t + 1] + 2 * i));
          _mm512_storeu_si512(to + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#endif
        }
      }
    }
  }

  // Rows [row, row + kRows) over `count` tokens from position `first` on.
  void strip(int row, int first, int count) {
    int last_row = std::min(row + kRows, rows_) - 1;
    int low_position = unit_.position + row / group_, high_position = unit_.position + last_row / group_;
    Range low = visible_.near(low_position), high = visible_.near(high_position);
    int stop = first + count;
    // The tokens that all rows see, without sinks, are [high.start, low.stop).
    bool has_sinks = first < visible_.num_sinks;
    if (!has_sinks && (stop <= low.start || first >= high.stop)) return;
    bool masked = has_sinks || first < high.start || stop > low.stop;
    int columns = round_up(count, kColumns);
    multiply_rows<Product>(queries_ + (size_t)row * depth_, depth_, keys_, kTileTokens, depth_, columns, nullptr,
                           scores_, kTileTokens);
    float shrink[kRows];
    std::fill(shrink, shrink + kRows, 1.0f);
    for (int r = 0; r <= last_row - row; r++) {
      float* mine = scores_ + r * kTileTokens;
      int at = row + r, position = unit_.position + at / group_;
      if (kDepth > 1) {
        for (int i = 0; i < columns; i += kLanes) store(mine + i, load(mine + i) * all((float)step_.scale));
      }
      cap_and_bias(step_, unit_.kv_head * group_ + at % group_, position, first, columns, mine);
      if (masked) {
        Range range = visible_.near(position);
        if (has_sinks) {
          hide_both(mine, columns, first, range, std::min(stop, range.stop));
        } else {
          hide(mine, columns, first, range.start, std::min(stop, range.stop));
        }
      } else if (count < columns) {
        hide(mine, columns, first, first, stop);
      }
      shrink[r] = weigh(mine, columns, tops_[row + r], totals_[row + r]);
      if constexpr (kDepth > 1) pair_up(mine, columns, weights_ + r * kTileTokens);
    }
    const float* weights = kDepth > 1 ? weights_ : scores_;
    multiply_rows<Product>(weights, kTileTokens, values_, value_stride_, steps_of(count), value_stride_, shrink,
                           outputs_ + (size_t)row * value_stride_, value_stride_);
  }

  // Hides tokens that are neither a sink nor in `range`; sinks that a query sees are before `stop`.
  void hide_both(float* scores, int count, int first, Range range, int stop) {
    IntVec number = lane_numbers() + first;
    for (int i = 0; i < count; i += kLanes, number += kLanes) {
      IntVec seen = ((number >= range.start) | (number < visible_.num_sinks)) & (number < stop);
      store(scores + i, choose(seen, load(scores + i), all(kMinusInfinity)));
    }
  }

  static void pair_up(const float* from, int count, float* to) {
#if defined(KVFRAME_AVX512) && defined(__AVX512BF16__)
    for (int i = 0; i < count; i += kLanes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 2), (__m256i)_mm512_cvtneps_pbh((__m512)load(from + i)));
    }
#endif
  }

  const Step& step_;
  Plan& plan_;
  const Part& part_;
  const Unit& unit_;
  Visible visible_;
  int group_, rows_, size_, value_size_;
  int depth_;  // elements or pairs of a query
  int value_stride_;
  float *queries_, *outputs_, *tops_, *totals_, *keys_, *values_, *scores_, *weights_;
  float key_scales_[kTileTokens], key_lows_[kTileTokens], value_scales_[kTileTokens], value_lows_[kTileTokens];
};

}  // namespace kvframe
