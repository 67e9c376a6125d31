// Divides a step into work items, and merges the parts of an output.
//
// A *unit* is a set of output rows: few queries of all heads, or a tile of queries of one KV head's group. Its keys are
// split into *parts* if there are too few units for the threads, or if units differ too much (split-KV, as in
// FlashDecoding, Dao et al. 2023). Each part writes its rows' largest score, the sum of their weights and the weighted
// sum of values. The part of a unit that finishes last merges them. Threads take the next part when they are done with
// one, so requests of any lengths balance.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "step.h"

namespace kvframe {

// A request with at most so many queries, and so many rows per KV head, is one unit with all heads: reading its keys takes
// longer than multiplying them.
constexpr int kMostFew = 4, kMostFewRows = 32;

struct Unit {
  int request;
  int64_t first_token;  // of the packed batch
  int num_queries, position;  // of the first query
  int kv_head;  // -1 for all heads
  int num_rows;
  Seen seen;
  int num_parts;
  int64_t partial;  // the first row of its first part
};

struct Part {
  int unit, number;
  Range keys;  // indices into the tokens that its unit sees
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Part> parts;
  std::vector<float> partials;
  std::unique_ptr<std::atomic<int>[]> unfinished;
  size_t num_counters = 0;
  int row_floats = 0;  // of a partial row: the values, the largest score, the sum
  std::atomic<int> next{0};

  void make(const Step& step, int max_rows);
};

inline int floats_of_row(const Step& step) { return round_up((int)step.head_size_v, kLanes); }

inline void Plan::make(const Step& step, int max_rows) {
  units.clear();
  parts.clear();
  int group = step.group_size(), tile = std::max(1, max_rows / group);
  int64_t total = 0;  // keys times KV heads times tiles
  auto few = [&](int count) { return count <= kMostFew && (count == 1 || count * group <= kMostFewRows); };
  for (int request = 0; request < step.num_reqs; request++) {
    int64_t first = step.query_start_loc[request];
    int count = (int)(step.query_start_loc[request + 1] - first);
    if (count == 0) continue;
    Visible visible(step, request);
    int position = visible.seq_len - count;
    if (few(count)) {
      Seen seen(visible, position, position + count - 1);
      units.push_back({request, first, count, position, -1, count * (int)step.num_heads, seen, 1, 0});
      total += (int64_t)seen.size() * step.num_kv_heads;
      continue;
    }
    // Tiles with the most keys first.
    for (int start = (count - 1) / tile * tile; start >= 0; start -= tile) {
      int num = std::min(tile, count - start);
      Seen seen(visible, position + start, position + start + num - 1);
      for (int head = 0; head < step.num_kv_heads; head++) {
        units.push_back({request, first + start, num, position + start, head, num * group, seen, 1, 0});
        total += (int64_t)seen.size() * (1 + num * group / 64);
      }
    }
  }
  // Sixteen parts per thread: the last part, for which the other threads wait, then is 3 % of the whole on average.
  int64_t wanted = step.num_threads > 1 ? total / (16 * step.num_threads) + 1 : total;
  row_floats = floats_of_row(step) + 2;
  int64_t num_partial = 0;
  for (int index = 0; index < (int)units.size(); index++) {
    Unit& unit = units[index];
    int64_t cost = unit.kv_head < 0 ? step.num_kv_heads : 1 + unit.num_queries * group / 64;
    int64_t longest = std::max<int64_t>(std::max<int64_t>(wanted / cost, step.part_tokens), 1);
    int size = unit.seen.size();
    unit.num_parts = (int)std::max<int64_t>(1, (size + longest - 1) / longest);
    int length = round_up((size + unit.num_parts - 1) / unit.num_parts, 16);
    unit.num_parts = std::max(1, (size + length - 1) / std::max(length, 1));
    unit.partial = num_partial;
    if (unit.num_parts > 1) num_partial += (int64_t)unit.num_parts * unit.num_rows;
    for (int number = 0; number < unit.num_parts; number++) {
      parts.push_back({index, number, {number * length, std::min(size, (number + 1) * length)}});
    }
  }
  if (partials.size() < (size_t)(num_partial * row_floats)) partials.resize(num_partial * row_floats);
  if (num_counters < units.size()) {
    num_counters = 2 * units.size();
    unfinished.reset(new std::atomic<int>[num_counters]);
  }
  for (size_t index = 0; index < units.size(); index++) unfinished[index] = units[index].num_parts;
  next = 0;
}

// One thread's memory, which its parts reuse.
class Scratch {
 public:
  // Frees all memory for the next part.
  void reset() { used_ = 0; }
  float* take(size_t count) {
    size_t at = used_;
    used_ += (count + 15) / 16 * 16;
    return at + base_;
  }
  void reserve(size_t count) {
    if (memory_.size() < count + 16) memory_.resize(count + 16);
    base_ = memory_.data() + (64 - (uintptr_t)memory_.data() % 64) % 64 / 4;
  }

 private:
  std::vector<float> memory_;
  float* base_ = nullptr;
  size_t used_ = 0;
};

// The place of a row's output.
struct Place {
  int64_t token;
  int head;
};

// Rows are sorted by KV head, then query, then head of the group.
inline Place place_of(const Step& step, const Unit& unit, int row) {
  int group = step.group_size(), head_rows = unit.num_queries * group, kv_head = unit.kv_head;
  if (kv_head < 0) kv_head = row / head_rows, row %= head_rows;
  return {unit.first_token + row / group, kv_head * group + row % group};
}

// Writes a row: a learned sink is one more score without a value.
inline void write_row(const Step& step, Place place, float top, float total, const float* values) {
  float share = 1;
  if (step.lse && total != 0) {
    step.lse[place.token * step.num_heads + place.head] = (top + std::log2(total)) / kLog2e;
  }
  if (step.sinks && total != 0) {
    float sink = step.sinks[place.head] * kLog2e, both = std::max(sink, top);
    share = exp2(top - both);
    total = total * share + exp2(sink - both);
  }
  // Queries that see no token get zeros.
  write_output(step, place.token, place.head, total == 0 ? 0 : share / total * (float)step.value_factor, values);
}

// Stores the result of a part, `values: [num_rows, floats_of_row]`, with scores as exponents of two. If it is the last
// part of its unit, merges all of them into the output.
inline void finish(const Step& step, Plan& plan, const Part& part, const float* tops, const float* totals,
                   const float* values) {
  const Unit& unit = plan.units[part.unit];
  int size = floats_of_row(step);
  if (unit.num_parts == 1) {
    for (int row = 0; row < unit.num_rows; row++) {
      write_row(step, place_of(step, unit, row), tops[row], totals[row], values + (size_t)row * size);
    }
    return;
  }
  size_t stride = plan.row_floats, first = (size_t)unit.partial * stride;
  for (int row = 0; row < unit.num_rows; row++) {
    float* to = plan.partials.data() + first + ((size_t)part.number * unit.num_rows + row) * stride;
    std::copy(values + (size_t)row * size, values + (size_t)(row + 1) * size, to);
    to[size] = tops[row];
    to[size + 1] = totals[row];
  }
  if (plan.unfinished[part.unit].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  for (int row = 0; row < unit.num_rows; row++) {
    float* whole = plan.partials.data() + first + (size_t)row * stride;
    for (int number = 1; number < unit.num_parts; number++) {
      const float* other = whole + (size_t)number * unit.num_rows * stride;
      float top = std::max(whole[size], other[size]);
      if (top == kMinusInfinity) continue;
      float keep = exp2(whole[size] - top), add = exp2(other[size] - top);
      for (int i = 0; i < size; i++) whole[i] = whole[i] * keep + other[i] * add;
      whole[size] = top;
      whole[size + 1] = whole[size + 1] * keep + other[size + 1] * add;
    }
    write_row(step, place_of(step, unit, row), whole[size], whole[size + 1], whole);
  }
}

}  // namespace kvframe
