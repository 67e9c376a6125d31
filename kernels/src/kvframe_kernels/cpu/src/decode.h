// Attention of requests with few queries (decodes), for all heads at once. Keys and values are read from their pages just
// once, a few tokens at a time in the order of memory, without a copy. A chunk of tokens is multiplied by all queries, then
// its values are added. The rows are the queries of a request with their heads; those of one KV head are adjacent.
#pragma once

#include "decode_tiles.h"
#include "scores.h"

namespace kvframe {

template <class Stored, class Keys>
class Decode {
 public:
  using Values = FloatOperand<Stored>;
  // Tokens that are read at a time. During the computation, as many later ones are prefetched: the processor's own
  // prefetching stops at the end of a run of pages and keeps too few lines in flight.
  static constexpr int kTogether = Stored::kScaled ? 8 : 4;
  // Tokens whose weights are computed at a time. In a long chunk the queries, and then the outputs, stay in the L1 cache,
  // where a miss waits for all prefetches. The scales of codes have to stay there, too.
  static constexpr int kChunk = Stored::kScaled ? 16 : 64;
  static constexpr int kKnown = kChunk + kTileSums;  // tokens whose addresses are known

  Decode(const Step& step, Plan& plan, Scratch& scratch, const Part& part)
      : step_(step),
        plan_(plan),
        part_(part),
        unit_(plan.units[part.unit]),
        rows_(unit_.num_rows),
        head_rows_(unit_.num_rows / (int)step.num_kv_heads),
        stride_(round_up(rows_, kLanes)),
        query_stride_(round_up((int)step.head_size, Keys::kElements) / Keys::kElements * Keys::kVecs * kLanes),
        value_stride_(round_up((int)step.head_size_v, Values::kElements)) {
    int longest = std::max(2 * query_stride_, std::max(value_stride_, floats_of_row(step)));
    scratch.reset();
    scratch.reserve((size_t)stride_ * (query_stride_ + value_stride_ + 5 + 5 * kChunk) + 3 * longest + 1024);
    queries_ = scratch.take((size_t)rows_ * query_stride_);
    row_ = scratch.take(longest + 1);
    query_order_ = reinterpret_cast<int*>(scratch.take(longest));
    value_order_ = reinterpret_cast<int*>(scratch.take(longest));
    outputs_ = scratch.take((size_t)rows_ * value_stride_);
    tops_ = scratch.take(stride_);
    totals_ = scratch.take(stride_);
    shrinks_ = scratch.take(stride_);
    query_sums_ = scratch.take(stride_);
    lows_ = scratch.take(stride_);
    scores_ = scratch.take((size_t)kChunk * stride_);
    for (float** scales : {&key_scales_, &key_lows_, &value_scales_, &value_lows_}) {
      *scales = scratch.take(Stored::kScaled ? (size_t)kChunk * stride_ + kLanes : 0);
    }
  }

  void run() {
    find_order<Keys>((int)step_.head_size, 2 * query_stride_, query_order_);
    find_order<Values>((int)step_.head_size_v, value_stride_, value_order_);
    for_each_tile([&](auto rows, int, int row) { pack<rows.value>(row); });
    std::fill(outputs_, outputs_ + (size_t)rows_ * value_stride_, 0.0f);
    // Low enough to stand for minus infinity, but finite, so that differences are numbers.
    std::fill(tops_, tops_ + stride_, kNone);
    std::fill(totals_, totals_ + stride_, 0.0f);
    std::fill(lows_, lows_ + stride_, 0.0f);
    std::fill(scores_, scores_ + (size_t)kChunk * stride_, 0.0f);
    Pages pages(step_, unit_.request);
    const Seen& seen = unit_.seen;
    int stop = part_.keys.stop;
    for (int at = part_.keys.start; at < stop;) {
      int count = std::min({kChunk, stop - at, seen.stretch_end(at) - at});
      find(pages, at, count, step_.key, keys_);
      find(pages, at, count, step_.value, values_);
      compute(pages, at, count);
      at += count;
    }
    for (int row = 0; row < rows_; row++) {
      if (totals_[row] == 0) tops_[row] = kMinusInfinity;
    }
    put_in_order();
    finish(step_, plan_, part_, tops_, totals_, outputs_);
  }

 private:
  static constexpr float kNone = -1e30f;

  // Lays the queries of `kRows` rows out in the order of keys, with equal places of the rows adjacent, padded with zeros.
  template <int kRows>
  void pack(int row) {
    constexpr int kPerVec = Keys::kPerVec;
    int num_vecs = query_stride_ / kLanes;
    for (int r = 0; r < kRows; r++) {
      Place place = place_of(step_, unit_, row + r);
      read_query(step_, place.token, place.head, 1.0f, num_vecs * kPerVec + 1, row_);
      float sum = 0;
      for (int i = 0; Stored::kScaled && i < (int)step_.head_size; i++) sum += row_[i];
      query_sums_[row + r] = sum;
      for (int vec = 0; vec < num_vecs; vec++) {
        float numbers[kPerVec];
        for (int i = 0; i < kPerVec; i++) numbers[i] = row_[query_order_[vec * kPerVec + i]];
        Keys::put(queries_ + (size_t)row * query_stride_ + (vec * kRows + r) * kLanes, numbers);
      }
    }
  }

  // The element at each place of an order, and `size` if a place has none.
  template <class Operand>
  void find_order(int size, int places, int* order) {
    for (int at = 0; at < places; at++) order[at] = std::min(Operand::element(at, size), size);
  }

  // Finds the addresses of `count` tokens and of the later ones that are prefetched; missing tokens repeat the last one.
  void find(const Pages& pages, int at, int count, const Plane& plane, const char** found) {
    int known = std::min(count + kTileSums, part_.keys.stop - at);
    pages.find(unit_.seen, at, known, plane, found);
    for (int i = known; i < kKnown; i++) found[i] = found[known - 1];
  }

  // Calls `tile<kRows>(kv_head, row)` for all rows, with as many rows of a KV head at a time as a tile has.
  template <class Tile>
  void for_each_tile(Tile tile) {
    for (int head = 0; head < step_.num_kv_heads; head++) {
      int row = head * head_rows_, stop = row + head_rows_;
      for (; stop - row >= 4; row += 4) tile(std::integral_constant<int, 4>(), head, row);
      if (stop - row >= 2) tile(std::integral_constant<int, 2>(), head, row), row += 2;
      if (stop - row >= 1) tile(std::integral_constant<int, 1>(), head, row);
    }
  }

  void compute(const Pages& pages, int at, int count) {
    if constexpr (Stored::kScaled) {
      read_scales(pages, at, count, step_.key_scale, key_scales_);
      read_scales(pages, at, count, step_.key_min, key_lows_);
      read_scales(pages, at, count, step_.value_scale, value_scales_);
      read_scales(pages, at, count, step_.value_min, value_lows_);
    }
    for (int t = 0; t < count; t += kTogether) {
      for_each_tile([&](auto rows, int head, int row) { multiply<rows.value>(head, row, t, std::min(count, t + kTogether)); });
    }
    if constexpr (Stored::kScaled) scale_products(count);
    int first = unit_.seen.position(at);
    cap_and_bias_rows(step_, unit_, (float)step_.scale, first, count, stride_, scores_);
    if (unit_.num_queries > 1) hide_rows(first, count);
    weigh_rows(count, stride_, scores_, tops_, totals_, shrinks_);
    if constexpr (Stored::kScaled) scale_weights(count);
    for (int t = 0; t < count;) {
      if (t + kTogether <= count) {
        for_each_tile([&](auto rows, int head, int row) { add<rows.value, kTogether>(head, row, t); });
        t += kTogether;
      } else {
        for_each_tile([&](auto rows, int head, int row) { add<rows.value, 1>(head, row, t); });
        t++;
      }
      std::fill(shrinks_, shrinks_ + stride_, 1.0f);
    }
  }

  // Writes a plane's numbers for this chunk's tokens and all rows to [count, stride]; prefetches those of later tokens.
  void read_scales(const Pages& pages, int at, int count, const Plane& plane, float* to) {
    if (!plane.at) return;
    const char* found[kKnown];
    find(pages, at, count, plane, found);
    for (int t = 0; t < count; t++, to += stride_) {
      fetch(found[t + kTogether]);
      for (int head = 0; head < step_.num_kv_heads; head++) {
        // Whole vectors: the next head overwrites the excess.
        Vec scale = all(read_scale(step_, found[t] + head * plane.head_stride));
        for (int r = 0; r < head_rows_; r += kLanes) store(to + head * head_rows_ + r, scale);
      }
    }
  }

  // A sum of codes times the scale is the sum of their numbers, except for the number of code zero.
  void scale_products(int count) {
    for (int i = 0; i < count * stride_; i += kLanes) {
      Vec score = load(scores_ + i);
      if (step_.key_scale.at) score *= load(key_scales_ + i);
      if (step_.key_min.at) score += load(key_lows_ + i) * load(query_sums_ + i % stride_);
      store(scores_ + i, score);
    }
  }

  // Turns weights of values into weights of codes, and sums up the weighted numbers of code zero, which each element
  // contains.
  void scale_weights(int count) {
    for (int row = 0; row < stride_; row += kLanes) {
      Vec lows = load(lows_ + row) * load(shrinks_ + row);
      for (int i = row; i < count * stride_; i += stride_) {
        Vec weight = load(scores_ + i);
        if (step_.value_min.at) lows = fma(weight, load(value_lows_ + i), lows);
        if (step_.value_scale.at) store(scores_ + i, weight * load(value_scales_ + i));
      }
      store(lows_ + row, lows);
    }
  }

  // Whether tiles of so many rows have separate code for the usual head size.
  template <int kRows>
  static constexpr bool is_usual() {
    return kRows == 4 && !Stored::kScaled;
  }

  template <int kRows>
  void multiply(int head, int row, int t, int stop) {
    constexpr int kTokens = kTileSums / kRows;
    if (t % kTokens) return;  // an earlier tile has computed these tokens
    // The last tile may extend beyond the chunk's tokens; its results there are not used.
    for (; t < stop; t += kTokens) {
      with_size<is_usual<kRows>()>(step_.head_size, [&](auto size) {
        multiply_tile<Keys, kRows>(queries_ + (size_t)row * query_stride_, keys_ + t, keys_ + t + std::max(kTogether, kTokens),
                                   head * step_.key.head_stride, size, scores_ + t * stride_ + row, stride_);
      });
    }
  }

  // Hides the tokens that single queries do not see, of `count` tokens from position `first` on.
  void hide_rows(int first, int count) {
    Visible visible(step_, unit_.request);
    int group = step_.group_size();
    for (int query = 0; query < unit_.num_queries; query++) {
      Range range = visible.near(unit_.position + query);
      if (range.start <= first && first + count <= range.stop) continue;
      for (int t = 0; t < count; t++) {
        int position = first + t;
        if ((position >= range.start || position < visible.num_sinks) && position < range.stop) continue;
        for (int head = 0; head < step_.num_kv_heads; head++) {
          float* hidden = scores_ + t * stride_ + head * head_rows_ + query * group;
          std::fill(hidden, hidden + group, kMinusInfinity);
        }
      }
    }
  }

  template <int kRows, int kCount>
  void add(int head, int row, int t) {
    with_size<is_usual<kRows>() && kCount != 1>(step_.head_size_v, [&](auto size) {
      add_tile<Values, kRows, kCount>(scores_ + t * stride_ + row, stride_, shrinks_ + row, values_ + t, values_ + t + kTogether,
                                      head * step_.value.head_stride, size, outputs_ + (size_t)row * value_stride_, value_stride_);
    });
  }

  // Puts rows of sums into the order of their elements, as `finish` takes them.
  void put_in_order() {
    int size = (int)step_.head_size_v, stride = floats_of_row(step_);
    for (int r = 0; r < rows_; r++) {
      const float* from = outputs_ + (size_t)r * value_stride_;
      for (int at = 0; at < value_stride_; at++) row_[value_order_[at]] = from[at] + lows_[r];
      // A row never moves to a later place, so it does not overwrite the next rows.
      std::copy_n(row_, size, outputs_ + (size_t)r * stride);
    }
  }

  const Step& step_;
  Plan& plan_;
  const Part& part_;
  const Unit& unit_;
  int rows_, head_rows_;  // of all heads; of a KV head
  int stride_;  // of scores: rows, and padding
  int query_stride_, value_stride_;
  float *queries_, *outputs_, *tops_, *totals_, *shrinks_, *query_sums_, *lows_, *scores_;
  float* row_;  // one query, or one output
  int *query_order_, *value_order_;
  float *key_scales_, *key_lows_, *value_scales_, *value_lows_;
  // The addresses of this chunk's tokens, and of the later tokens that are prefetched.
  const char *keys_[kKnown], *values_[kKnown];
};

}  // namespace kvframe
