// One query per request, all heads at once: keys and values are read from their pages just once, in the order in which they
// lie there, which is what the processor's own prefetching follows best, and nothing is copied. A chunk's keys are
// multiplied token by token, then its values are added a few tokens at a time.
#pragma once

#include "product.h"
#include "scores.h"

namespace kvframe {

constexpr int kChunk = 16;  // tokens at a time
constexpr int kTokens = 4;  // of these, whose values are added at a time
// How far ahead of what is computed memory is asked for. The processor's own prefetching stops at the end of a run of
// pages and keeps too few lines on their way; these requests have to be spread evenly, as only so many fit in its queue.
constexpr int kAheadBytes = 32768;
#if defined(KVFRAME_AVX512)
constexpr int kHeads = 16;  // query heads whose products are in registers
#else
constexpr int kHeads = 8;
#endif

#if defined(KVFRAME_AVX512)
// The sums of sixteen vectors, each in the lane of its number.
inline __m512 sums_of_sixteen(const __m512* v) {
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

// Keys as floats, for queries that are floats, too.
template <class Stored>
struct FloatKeys {
  static constexpr int kPerVec = kLanes, kBytes = Stored::kBytes;
  static constexpr bool kScaled = Stored::kScaled;
  static Vec full(const char* row, int i, int size) { return Stored::full(row, i, size); }
  static Vec few(const char* row, int i, int count, int size) { return Stored::few(row, i, count, size); }
  static Vec multiply_add(Vec query, Vec key, Vec sum) { return fma(query, key, sum); }
};

#if defined(KVFRAME_AVX512) && defined(__AVX512BF16__)
// Keys and queries of bfloat16 as they are, two a float.
struct PairKeys {
  static constexpr int kPerVec = 2 * kLanes, kBytes = 2;
  static constexpr bool kScaled = false;
  static Vec full(const char* row, int i, int) { return *reinterpret_cast<const LooseVec*>(row + 2 * i); }
  static Vec few(const char* row, int i, int count, int) {
    return (Vec)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), row + 2 * i);
  }
  static Vec multiply_add(Vec query, Vec key, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)query, (__m512bh)key);
  }
};
#endif

// The products of one token's keys with kHeads queries, `stride` floats apart, the first of which is `head`. Where kGroup
// is 0, any number of query heads shares a KV head. `ahead` is the key of a later token, which is fetched meanwhile.
template <class Keys, int kGroup>
inline void multiply_token(const Step& step, const float* queries, int stride, int head, const char* key,
                           float* products, const char* ahead, const float* scales, const float* lows) {
  int size = (int)step.head_size, whole = size / Keys::kPerVec * Keys::kPerVec, group = step.group_size();
  int last = (int)step.num_heads - 1;
  Vec sums[kHeads] = {};
  constexpr int kShare = kGroup ? kGroup : 1;
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; h += kShare) {
    // Heads behind the last repeat it.
    int kv_head = std::min(head + h, last) / (kGroup ? kGroup : group);
    const char* row = key + kv_head * step.key.head_stride;
    Vec scale = {}, low = {};
    if constexpr (Keys::kScaled) scale = all(scales[kv_head]), low = all(lows[kv_head]);
    const float* mine[kShare];
#pragma GCC unroll 16
    for (int g = 0; g < kShare; g++) mine[g] = queries + std::min(head + h + g, last) * stride;
    int at = 0;
    int64_t offset = row - key;
#pragma GCC unroll 1
    for (int i = 0; i < whole; i += Keys::kPerVec, at += kLanes) {
      if (i * Keys::kBytes % 64 == 0) fetch(ahead + offset + i * Keys::kBytes);
      Vec part = Keys::full(row, i, size);
      if constexpr (Keys::kScaled) part = fma(part, scale, low);
#pragma GCC unroll 16
      for (int g = 0; g < kShare; g++) sums[h + g] = Keys::multiply_add(load(mine[g] + at), part, sums[h + g]);
    }
    if (whole < size) {
      // Zeros of the query stand against what is behind the last element.
      Vec part = Keys::few(row, whole, size - whole, size);
      if constexpr (Keys::kScaled) part = fma(part, scale, low);
#pragma GCC unroll 16
      for (int g = 0; g < kShare; g++) sums[h + g] = Keys::multiply_add(load(mine[g] + at), part, sums[h + g]);
    }
  }
#if defined(KVFRAME_AVX512)
  _mm512_storeu_ps(products, sums_of_sixteen(reinterpret_cast<const __m512*>(sums)));
#else
  for (int h = 0; h < kHeads; h++) products[h] = sum(sums[h]);
#endif
}

// outputs[g] = outputs[g] * shrink[g] + the sum over kCount tokens of weights[token][g] * value, for kGroup heads.
template <class Stored, int kGroup, int kCount>
inline void add_values(const float* weights, int weight_stride, const float* shrink, const char* const* values,
                       int ahead, int64_t offset, int size, const float* scales, const float* lows, int scale_stride,
                       float* outputs, int stride) {
  constexpr int kVecs = kLanes == 16 ? 4 : 1;
  int i = 0;
#pragma GCC unroll 1
  for (; i + kVecs * kLanes <= size; i += kVecs * kLanes) {
    Vec sums[kGroup][kVecs];
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; g++) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) {
        Vec before = load(outputs + g * stride + i + j * kLanes);
        sums[g][j] = shrink ? before * all(shrink[g]) : before;
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < kCount; t++) {
      Vec value[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) {
        value[j] = Stored::full(values[t] + offset, i + j * kLanes, size);
        if constexpr (Stored::kScaled) value[j] = fma(value[j], all(scales[t * scale_stride]), all(lows[t * scale_stride]));
      }
#pragma GCC unroll 4
      for (int j = 0; j < kVecs * kLanes * Stored::kBytes; j += 64) fetch(values[t + ahead] + offset + i * Stored::kBytes + j);
#pragma GCC unroll 8
      for (int g = 0; g < kGroup; g++) {
        Vec weight = all(weights[t * weight_stride + g]);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; j++) sums[g][j] = fma(weight, value[j], sums[g][j]);
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; g++) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) store(outputs + g * stride + i + j * kLanes, sums[g][j]);
    }
  }
#pragma GCC unroll 1
  for (; i < size; i += kLanes) {
    int left = size - i;
    for (int g = 0; g < kGroup; g++) {
      Vec sums = load(outputs + g * stride + i);
      if (shrink) sums *= all(shrink[g]);
      for (int t = 0; t < kCount; t++) {
        const char* row = values[t] + offset;
        Vec value = left >= kLanes ? Stored::full(row, i, size) : Stored::few(row, i, left, size);
        if constexpr (Stored::kScaled) value = fma(value, all(scales[t * scale_stride]), all(lows[t * scale_stride]));
        sums = fma(all(weights[t * weight_stride + g]), value, sums);
      }
      store(outputs + g * stride + i, sums);
    }
  }
}

template <class Stored, class Keys>
class Decode {
 public:
  static constexpr bool kPairs = Keys::kPerVec > kLanes;

  Decode(const Step& step, Plan& plan, Scratch& scratch, const Piece& piece)
      : step_(step),
        plan_(plan),
        piece_(piece),
        unit_(plan.units[piece.unit]),
        group_(step.group_size()),
        heads_(round_up((int)step.num_heads, std::max(kHeads, kLanes))),
        query_stride_(round_up((int)step.head_size, Keys::kPerVec) * kLanes / Keys::kPerVec),
        value_stride_(floats_of_row(step)),
        ahead_(std::min(kChunk, std::max(kTokens, kAheadBytes / std::max(1, row_bytes(step))))) {
    scratch.reset();
    scratch.reserve((size_t)heads_ * (query_stride_ + value_stride_ + 3 + 5 * kChunk) + 512);
    queries_ = scratch.take((size_t)heads_ * query_stride_);
    outputs_ = scratch.take((size_t)heads_ * value_stride_);
    tops_ = scratch.take(heads_);
    totals_ = scratch.take(heads_);
    shrinks_ = scratch.take(heads_);
    size_t scales = (size_t)kChunk * step.num_kv_heads;
    key_scales_ = scratch.take(scales), key_lows_ = scratch.take(scales);
    value_scales_ = scratch.take(scales), value_lows_ = scratch.take(scales);
    scores_ = scratch.take((size_t)kChunk * heads_);
  }

  void run() {
    for (int head = 0; head < step_.num_heads; head++) {
      float* to = queries_ + head * query_stride_;
      if constexpr (kPairs) {
        int64_t from = unit_.first_token * step_.query_token_stride + head * step_.query_head_stride;
        std::memset(to, 0, 4 * query_stride_);
        std::memcpy(to, step_.query + 2 * from, 2 * step_.head_size);
      } else {
        read_query(step_, unit_.first_token, head, 1.0f, query_stride_, to);
      }
    }
    std::fill(outputs_, outputs_ + heads_ * value_stride_, 0.0f);
    // Low enough to stand for none, and finite: differences are numbers.
    std::fill(tops_, tops_ + heads_, kNone);
    std::fill(totals_, totals_ + heads_, 0.0f);
    Pages pages(step_, unit_.request);
    const Seen& seen = unit_.seen;
    // Of this chunk and of the next one; behind the last token it is repeated.
    const char *keys[2 * kChunk], *values[2 * kChunk];
    int stop = piece_.keys.stop;
    for (int at = piece_.keys.start; at < stop;) {
      int count = std::min({kChunk, stop - at, seen.stretch_end(at) - at});
      int known = std::min(count + kChunk, stop - at);
      pages.find(seen, at, known, step_.key, keys);
      pages.find(seen, at, known, step_.value, values);
      for (int i = known; i < 2 * kChunk; i++) keys[i] = keys[known - 1], values[i] = values[known - 1];
      compute(keys, values, pages, at, count);
      at += count;
    }
    for (int head = 0; head < step_.num_heads; head++) {
      if (totals_[head] == 0) tops_[head] = kMinusInfinity;
    }
    finish(step_, plan_, piece_, tops_, totals_, outputs_);
  }

 private:
  static constexpr float kNone = -1e30f;

  static int row_bytes(const Step& step) { return (int)(step.num_kv_heads * step.head_size) * Stored::kBytes; }

  void compute(const char* const* keys, const char* const* values, const Pages& pages, int at, int count) {
    if constexpr (Stored::kScaled) {
      read_scales(pages, at, count, step_.key_scale, 1.0f, key_scales_);
      read_scales(pages, at, count, step_.key_min, 0.0f, key_lows_);
      read_scales(pages, at, count, step_.value_scale, 1.0f, value_scales_);
      read_scales(pages, at, count, step_.value_min, 0.0f, value_lows_);
    }
    for (int t = 0; t < count; t++) {
      switch (group_) {
        case 1: multiply<1>(keys[t], t, keys[t + ahead_]); break;
        case 2: multiply<2>(keys[t], t, keys[t + ahead_]); break;
        case 4: multiply<4>(keys[t], t, keys[t + ahead_]); break;
        case 8: multiply<8>(keys[t], t, keys[t + ahead_]); break;
        default: multiply<0>(keys[t], t, keys[t + ahead_]); break;
      }
    }
    cap_and_bias_heads(step_, (float)step_.scale, unit_.position, unit_.seen.position(at), count, heads_, scores_);
    weigh_heads(count, heads_, scores_, tops_, totals_, shrinks_);
    const float* shrinks = shrinks_;
    int t = 0;
    for (; t + kTokens <= count; t += kTokens, shrinks = nullptr) add<kTokens>(values + t, t, shrinks);
    for (; t < count; t++, shrinks = nullptr) add<1>(values + t, t, shrinks);
  }

  // Reads what a plane has for each token and KV head into [kChunk, num_kv_heads].
  void read_scales(const Pages& pages, int at, int count, const Plane& plane, float missing, float* to) {
    int heads = (int)step_.num_kv_heads;
    const char* found[kChunk];
    if (plane.at) pages.find(unit_.seen, at, count, plane, found);
    for (int t = 0; t < count; t++) {
      for (int head = 0; head < heads; head++) {
        to[t * heads + head] = plane.at ? read_scale(step_, found[t] + head * plane.head_stride) : missing;
      }
    }
  }

  template <int kGroup>
  void multiply(const char* key, int t, const char* ahead) {
    for (int head = 0; head < step_.num_heads; head += kHeads) {
      multiply_token<Keys, kGroup>(step_, queries_, query_stride_, head, key, scores_ + t * heads_ + head, ahead,
                                   key_scales_ + t * step_.num_kv_heads, key_lows_ + t * step_.num_kv_heads);
    }
  }

  template <int kCount>
  void add(const char* const* values, int t, const float* shrinks) {
    for (int kv_head = 0; kv_head < step_.num_kv_heads; kv_head++) {
      int first = kv_head * group_, done = 0;
      int64_t offset = kv_head * step_.value.head_stride;
      for (; group_ - done >= 4; done += 4) add_heads<4, kCount>(values, t, shrinks, offset, first + done);
      if (group_ - done >= 2) add_heads<2, kCount>(values, t, shrinks, offset, first + done), done += 2;
      if (group_ - done >= 1) add_heads<1, kCount>(values, t, shrinks, offset, first + done);
    }
  }

  template <int kGroup, int kCount>
  void add_heads(const char* const* values, int t, const float* shrinks, int64_t offset, int head) {
    int64_t first_scale = t * step_.num_kv_heads + head / group_;
    add_values<Stored, kGroup, kCount>(scores_ + t * heads_ + head, heads_, shrinks ? shrinks + head : nullptr, values,
                                       ahead_, offset, (int)step_.head_size_v, value_scales_ + first_scale,
                                       value_lows_ + first_scale, (int)step_.num_kv_heads,
                                       outputs_ + head * value_stride_, value_stride_);
  }

  const Step& step_;
  Plan& plan_;
  const Piece& piece_;
  const Unit& unit_;
  int group_;
  int heads_;  // query heads, and room behind them
  int query_stride_, value_stride_;
  int ahead_;  // tokens
  float *queries_, *outputs_, *tops_, *totals_, *shrinks_, *scores_;
  float *key_scales_, *key_lows_, *value_scales_, *value_lows_;
};

}  // namespace kvframe
