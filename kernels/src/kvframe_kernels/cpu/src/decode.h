// One query per request, all heads at once: keys and values are read from their pages just once, in the order that they
// lie there, and nothing is copied. The group of query heads that share a KV head is computed together.
#pragma once

#include "scores.h"

namespace kvframe {

constexpr int kChunk = 16;  // tokens at a time

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

// Multiplies `kGroup` queries, `stride` floats apart, with the keys of a chunk, into `products: [kGroup, kChunk]`.
template <class Stored, int kGroup>
inline void multiply_keys(const float* queries, int stride, int size, const char* const* keys, float* products) {
#if defined(KVFRAME_AVX512)
  constexpr int kTokens = 16 / kGroup;
#else
  constexpr int kTokens = 2;
#endif
  int whole = size / kLanes * kLanes;
#pragma GCC unroll 1
  for (int t = 0; t < kChunk; t += kTokens) {
    Vec sums[kGroup][kTokens] = {};
#pragma GCC unroll 1
    for (int i = 0; i < whole; i += kLanes) {
      Vec query[kGroup];
#pragma GCC unroll 8
      for (int g = 0; g < kGroup; g++) query[g] = load(queries + g * stride + i);
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; j++) {
        Vec key = Stored::full(keys[t + j], i);
#pragma GCC unroll 8
        for (int g = 0; g < kGroup; g++) sums[g][j] = fma(query[g], key, sums[g][j]);
      }
    }
    if (whole < size) {
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; j++) {
        Vec key = Stored::few(keys[t + j], whole, size - whole);
#pragma GCC unroll 8
        for (int g = 0; g < kGroup; g++) sums[g][j] = fma(load(queries + g * stride + whole), key, sums[g][j]);
      }
    }
#if defined(KVFRAME_AVX512)
    alignas(64) float found[16];
    _mm512_store_ps(found, sums_of_sixteen(reinterpret_cast<const __m512*>(&sums[0][0])));
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; g++) {
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; j++) products[g * kChunk + t + j] = found[g * kTokens + j];
    }
#else
    for (int g = 0; g < kGroup; g++) {
      for (int j = 0; j < kTokens; j++) products[g * kChunk + t + j] = sum(sums[g][j]);
    }
#endif
  }
}

// outputs[g] = outputs[g] * shrink[g] + sum over tokens of weights[g][token] * value.
template <class Stored, int kGroup>
inline void add_values(const float* weights, const float* shrink, const char* const* values, int count, int size,
                       float* outputs, int stride) {
  constexpr int kVecs = kLanes == 16 ? 4 : 2;
  int i = 0;
#pragma GCC unroll 1
  for (; i + kVecs * kLanes <= size; i += kVecs * kLanes) {
    Vec sums[kGroup][kVecs];
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; g++) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) sums[g][j] = load(outputs + g * stride + i + j * kLanes) * all(shrink[g]);
    }
#pragma GCC unroll 1
    for (int t = 0; t < count; t++) {
      Vec value[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; j++) value[j] = Stored::full(values[t], i + j * kLanes);
#pragma GCC unroll 8
      for (int g = 0; g < kGroup; g++) {
        Vec weight = all(weights[g * kChunk + t]);
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
    Vec sums[kGroup];
    int left = size - i;
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; g++) sums[g] = load(outputs + g * stride + i) * all(shrink[g]);
    for (int t = 0; t < count; t++) {
      Vec value = left >= kLanes ? Stored::full(values[t], i) : Stored::few(values[t], i, left);
#pragma GCC unroll 8
      for (int g = 0; g < kGroup; g++) sums[g] = fma(all(weights[g * kChunk + t]), value, sums[g]);
    }
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; g++) store(outputs + g * stride + i, sums[g]);
  }
}

inline void prefetch(const char* from, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

template <class Stored>
class Decode {
 public:
  Decode(const Step& step, Plan& plan, Scratch& scratch, const Piece& piece)
      : step_(step),
        plan_(plan),
        piece_(piece),
        unit_(plan.units[piece.unit]),
        query_stride_(round_up((int)step.head_size, kLanes)),
        value_stride_(floats_of_row(step)) {
    scratch.reset();
    int heads = (int)step.num_heads;
    scratch.reserve((size_t)heads * (query_stride_ + value_stride_ + 2) + 256);
    queries_ = scratch.take((size_t)heads * query_stride_);
    outputs_ = scratch.take((size_t)heads * value_stride_);
    tops_ = scratch.take(heads);
    totals_ = scratch.take(heads);
  }

  void run() {
    int heads = (int)step_.num_heads;
    for (int head = 0; head < heads; head++) {
      read_query(step_, unit_.first_token, head, (float)step_.scale, query_stride_, queries_ + head * query_stride_);
    }
    std::fill(outputs_, outputs_ + heads * value_stride_, 0.0f);
    std::fill(tops_, tops_ + heads, kMinusInfinity);
    std::fill(totals_, totals_ + heads, 0.0f);
    Pages pages(step_, unit_.request);
    const Seen& seen = unit_.seen;
    Chunk chunks[2];
    int stop = piece_.keys.stop, at = piece_.keys.start;
    if (at < stop) chunks[0].find(pages, seen, at, stop);
    for (int number = 0; at < stop; number++) {
      Chunk &chunk = chunks[number & 1], &next = chunks[(number + 1) & 1];
      int behind = at + chunk.count;
      next.count = 0;
      if (behind < stop) next.find(pages, seen, behind, stop);
      compute(chunk, next, seen.position(at));
      at = behind;
    }
    finish(step_, plan_, piece_, tops_, totals_, outputs_);
  }

 private:
  // Tokens at consecutive positions; those behind `count` repeat the last one.
  struct Chunk {
    const char *keys[kChunk], *values[kChunk];
    int count = 0;

    void find(const Pages& pages, const Seen& seen, int at, int stop) {
      count = std::min({kChunk, stop - at, seen.stretch_end(at) - at});
      pages.find(seen, at, count, keys, values);
      for (int i = count; i < kChunk; i++) keys[i] = keys[count - 1], values[i] = values[count - 1];
    }
  };

  void compute(const Chunk& chunk, const Chunk& next, int position) {
    int group = step_.group_size();
    const char *keys[kChunk], *values[kChunk];
    for (int kv_head = 0; kv_head < step_.num_kv_heads; kv_head++) {
      for (int t = 0; t < kChunk; t++) {
        keys[t] = chunk.keys[t] + kv_head * step_.key_head_stride;
        values[t] = chunk.values[t] + kv_head * step_.value_head_stride;
      }
      for (int t = 0; t < next.count; t++) {
        prefetch(next.keys[t] + kv_head * step_.key_head_stride, (int)step_.head_size * Stored::kBytes);
        prefetch(next.values[t] + kv_head * step_.value_head_stride, (int)step_.head_size_v * Stored::kBytes);
      }
      int first = kv_head * group, done = 0;
      for (; group - done >= 4; done += 4) attend<4>(first + done, keys, values, chunk.count, position);
      if (group - done >= 2) attend<2>(first + done, keys, values, chunk.count, position), done += 2;
      if (group - done >= 1) attend<1>(first + done, keys, values, chunk.count, position);
    }
  }

  template <int kGroup>
  void attend(int head, const char* const* keys, const char* const* values, int count, int position) {
    alignas(64) float scores[kGroup * kChunk], shrink[kGroup];
    multiply_keys<Stored, kGroup>(queries_ + head * query_stride_, query_stride_, (int)step_.head_size, keys, scores);
    for (int g = 0; g < kGroup; g++) {
      float* mine = scores + g * kChunk;
      cap_and_bias(step_, head + g, unit_.position, position, kChunk, mine);
      if (count < kChunk) hide(mine, kChunk, 0, 0, count);
      shrink[g] = weigh(mine, kChunk, tops_[head + g], totals_[head + g]);
    }
    add_values<Stored, kGroup>(scores, shrink, values, count, (int)step_.head_size_v, outputs_ + head * value_stride_,
                               value_stride_);
  }

  const Step& step_;
  Plan& plan_;
  const Piece& piece_;
  const Unit& unit_;
  int query_stride_, value_stride_;
  float *queries_, *outputs_, *tops_, *totals_;
};

}  // namespace kvframe
