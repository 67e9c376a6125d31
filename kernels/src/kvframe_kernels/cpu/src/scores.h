// Turns products of queries and keys into weights: scale, soft cap, biases, mask, and the online softmax of Milakov
// and Gimelshein (arXiv 1805.02867). Scores are exponents of two.
#pragma once

#include "work.h"

namespace kvframe {

// Turns `count` products (a multiple of kLanes) of one query with tokens at consecutive positions from `first` on into
// scores. `products` already includes the scale.
inline void cap_and_bias(const Step& step, int head, int query_position, int first, int count, float* products) {
  if (step.soft_cap) {
    Vec inverse = all((float)(1 / step.soft_cap)), cap = all((float)(step.soft_cap * kLog2e));
    for (int i = 0; i < count; i += kLanes) store(products + i, cap * tanh(load(products + i) * inverse));
  } else {
    for (int i = 0; i < count; i += kLanes) store(products + i, load(products + i) * all(kLog2e));
  }
  if (step.bias) {
    int far = (int)step.max_distance;
    const float* of_head = step.bias + (int64_t)head * (2 * far + 1) + far;
    for (int i = 0; i < count; i++) {
      int distance = std::min(std::max(first + i - query_position, -far), far);
      products[i] += of_head[distance] * kLog2e;
    }
  }
  if (step.slopes) {
    float slope = step.slopes[head] * kLog2e;
    for (int i = 0; i < count; i++) products[i] -= slope * (float)std::abs(first + i - query_position);
  }
}

// Replaces scores outside of [low, stop) by minus infinity; `first` is the index of the first score.
inline void hide(float* scores, int count, int first, int low, int stop) {
  IntVec number = lane_numbers() + first;
  for (int i = 0; i < count; i += kLanes, number += kLanes) {
    store(scores + i, choose((number >= low) & (number < stop), load(scores + i), all(kMinusInfinity)));
  }
}

// Replaces scores by weights, and returns the factor by which earlier sums have to shrink.
inline float weigh(float* scores, int count, float& top, float& total) {
  Vec most = load(scores);
  for (int i = kLanes; i < count; i += kLanes) most = max(most, load(scores + i));
  float higher = std::max(top, largest(most));
  if (higher == kMinusInfinity) {
    for (int i = 0; i < count; i += kLanes) store(scores + i, Vec{});
    return 1;
  }
  Vec sums = {}, subtracted = all(higher);
  for (int i = 0; i < count; i += kLanes) {
    Vec weight = exp2(load(scores + i) - subtracted);
    sums += weight;
    store(scores + i, weight);
  }
  float shrink = higher == top ? 1 : exp2(top - higher);
  top = higher;
  total = total * shrink + sum(sums);
  return shrink;
}

// The same for a chunk of tokens and all rows of a unit of all heads, `scores: [num_tokens, stride]`, with adjacent rows.
// The padding after the last row is computed, too.
inline void cap_and_bias_rows(const Step& step, const Unit& unit, float factor, int first, int num_tokens, int stride,
                              float* scores) {
  if (step.soft_cap) {
    Vec inverse = all((float)(factor / step.soft_cap)), cap = all((float)(step.soft_cap * kLog2e));
    for (int i = 0; i < num_tokens * stride; i += kLanes) store(scores + i, cap * tanh(load(scores + i) * inverse));
  } else {
    Vec both = all(factor * kLog2e);
    for (int i = 0; i < num_tokens * stride; i += kLanes) store(scores + i, load(scores + i) * both);
  }
  if (!step.bias && !step.slopes) return;
  int far = (int)step.max_distance;
  for (int row = 0; row < unit.num_rows; row++) {
    Place place = place_of(step, unit, row);
    int position = unit.position + (int)(place.token - unit.first_token);
    if (step.bias) {
      const float* of_head = step.bias + (int64_t)place.head * (2 * far + 1) + far;
      for (int t = 0; t < num_tokens; t++) {
        scores[t * stride + row] += of_head[std::min(std::max(first + t - position, -far), far)] * kLog2e;
      }
    }
    if (step.slopes) {
      float slope = step.slopes[place.head] * kLog2e;
      for (int t = 0; t < num_tokens; t++) scores[t * stride + row] -= slope * (float)std::abs(first + t - position);
    }
  }
}

// Replaces scores by weights, updates each row's largest score and sum, and returns the factor by which its sum shrinks.
inline void weigh_rows(int num_tokens, int stride, float* scores, float* tops, float* totals, float* shrinks) {
  for (int row = 0; row < stride; row += kLanes) {
    float* mine = scores + row;
    Vec top = load(tops + row), higher = top;
    for (int t = 0; t < num_tokens; t++) higher = max(higher, load(mine + t * stride));
    Vec shrink = exp2(top - higher), total = load(totals + row) * shrink;
    for (int t = 0; t < num_tokens; t++) {
      Vec weight = exp2(load(mine + t * stride) - higher);
      total += weight;
      store(mine + t * stride, weight);
    }
    store(tops + row, higher);
    store(totals + row, total);
    store(shrinks + row, shrink);
  }
}

}  // namespace kvframe
