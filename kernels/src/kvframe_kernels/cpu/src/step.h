// One call's arguments, as Python fills them in (`attention.py` has the same fields in the same order), and values that
// follow from them: the tokens that a query sees, and their addresses.
#pragma once

#include <algorithm>

#include "stored.h"

namespace kvframe {

enum Dtype { kFloat32, kBFloat16, kFloat16, kFloat8, kInt8, kNibble };

// A tensor [num_block_ids, block_size, num_kv_heads, ...] of the cache, or null, with its strides in bytes.
struct Plane {
  const char* at;
  int64_t block_stride, token_stride, head_stride;
};

struct Step {
  // The input and the output: [num_tokens, num_heads, head_size] and [num_tokens, num_heads, head_size_v], in elements.
  const char* query;
  char* output;
  int64_t query_token_stride, query_head_stride;
  // The cache. Scales and smallest elements belong to one token and head; null if there are none.
  Plane key, value;
  Plane key_scale, value_scale, key_min, value_min;
  // The batch, all int32.
  const int32_t *query_start_loc, *seq_lens, *seq_starts, *block_table;
  const int32_t* range_ends;   // [num_tokens] or null: each query sees the later tokens before this one
  int64_t block_table_stride;
  const float* sinks;  // [num_heads] or null
  const float* bias;   // [num_heads, 2 * max_distance + 1] or null
  const float* slopes;  // [num_heads] or null: what a score loses for each token between its query and its key
  float* lse;          // [num_tokens, num_heads] or null: written for queries that see a token, without sinks
  int64_t max_distance;
  int64_t num_reqs, num_tokens, block_size;
  int64_t num_heads, num_kv_heads, head_size, head_size_v;
  int64_t query_dtype, stored_dtype, scale_dtype;
  int64_t causal;
  int64_t window, num_sink_tokens, chunk;  // 0 for none
  int64_t num_threads;
  int64_t part_tokens;  // the fewest keys of a work item
  double scale, soft_cap;  // 0 for no cap
  double value_factor;  // the factor on all values

  int group_size() const { return (int)(num_heads / num_kv_heads); }
};

// Positions [start, stop).
struct Range {
  int start, stop;
  int size() const { return stop > start ? stop - start : 0; }
};

// The tokens that the queries of one request see, by position.
struct Visible {
  int seq_start, seq_len, window, num_sinks, chunk;
  bool causal;
  int first_position;         // of the request's queries
  const int32_t* range_ends;  // of the request's queries, or null

  Visible(const Step& step, int request)
      : seq_start(step.seq_starts ? step.seq_starts[request] : 0),
        seq_len(step.seq_lens[request]),
        window((int)step.window),
        num_sinks(step.causal && step.window ? (int)step.num_sink_tokens : 0),
        chunk((int)step.chunk),
        causal(step.causal != 0),
        first_position(seq_len - (step.query_start_loc[request + 1] - step.query_start_loc[request])),
        range_ends(step.range_ends ? step.range_ends + step.query_start_loc[request] : nullptr) {}

  // The tokens that the query at `position` sees, without the sinks before them. Neither end decreases with `position`:
  // ranges are disjoint, and a query sees no token after its own range.
  Range near(int position) const {
    if (!causal) return {seq_start, seq_len};
    int start = seq_start;
    if (window) start = std::max(start, position - window + 1);
    if (chunk) start = std::max(start, position - position % chunk);
    int stop = position + 1;
    if (range_ends) stop = std::max(stop, (int)range_ends[position - first_position]);
    return {start, stop};
  }

  // The sinks before `start`.
  Range sinks(int start) const { return {seq_start, std::min(num_sinks, start)}; }
};

// The tokens that a tile of consecutive queries sees, in order: sinks, then a run. Indices count both together.
struct Seen {
  Range sinks, run;

  Seen(const Visible& visible, int first_position, int last_position) {
    run = {visible.near(first_position).start, visible.near(last_position).stop};
    sinks = visible.sinks(run.start);
  }
  int size() const { return sinks.size() + run.size(); }
  int position(int index) const {
    return index < sinks.size() ? sinks.start + index : run.start + index - sinks.size();
  }
  // The first index after `index` at which positions are not consecutive.
  int stretch_end(int index) const { return index < sinks.size() ? sinks.size() : size(); }
};

// The addresses of tokens' keys and values.
struct Pages {
  const Step& step;
  const int32_t* blocks;

  Pages(const Step& step, int request) : step(step), blocks(step.block_table + request * step.block_table_stride) {}

  // Fills in the addresses in a plane of tokens [index, index + count) of `seen`, for the first head.
  void find(const Seen& seen, int index, int count, const Plane& plane, const char** found) const {
    int size = (int)step.block_size;
    for (int i = 0; i < count;) {
      int position = seen.position(index + i), block = position / size, offset = position - block * size;
      int run = std::min({count - i, size - offset, seen.stretch_end(index + i) - index - i});
      const char* at = plane.at + blocks[block] * plane.block_stride + offset * plane.token_stride;
      for (int j = 0; j < run; j++, i++) found[i] = at + j * plane.token_stride;
    }
  }
};

inline float read_scale(const Step& step, const char* at) {
  return step.scale_dtype == kFloat32 ? Float32::element(at, 0) : Float16::element(at, 0);
}

// A row of the queries as floats, times `factor`, padded with zeros to `padded` elements.
inline void read_query(const Step& step, int64_t token, int head, float factor, int padded, float* to) {
  int64_t at = token * step.query_token_stride + head * step.query_head_stride;
  int size = (int)step.head_size;
  auto read = [&](auto stored) {
    using Stored = decltype(stored);
    for (int i = 0; i < size; i++) to[i] = factor * Stored::element(step.query + Stored::kBytes * at, i);
  };
  switch (step.query_dtype) {
    case kFloat32: read(Float32()); break;
    case kBFloat16: read(BFloat16()); break;
    default: read(Float16()); break;
  }
  std::fill(to + size, to + padded, 0.0f);
}

// A row of the output: the given numbers times `factor`.
inline void write_output(const Step& step, int64_t token, int head, float factor, const float* from) {
  int size = (int)step.head_size_v;
  int64_t at = (token * step.num_heads + head) * size;
  auto write = [=, &step](auto stored) {
    using Stored = decltype(stored);
    char* __restrict to = step.output + Stored::kBytes * at;
    for (int i = 0; i < size; i++) Stored::put(to, i, factor * from[i]);
  };
  switch (step.query_dtype) {
    case kFloat32: write(Float32()); break;
    case kBFloat16: write(BFloat16()); break;
    default: write(Float16()); break;
  }
}

}  // namespace kvframe
