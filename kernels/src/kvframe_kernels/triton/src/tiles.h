// Divides a step's requests into tiles, with the numbers of attention_plan.py.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SMALL_ROWS = 64, ITEM_NUMBERS = 8, SPLIT_NUMBERS = 4, ALIGNMENT = 16, MAX_SHAPES = 2 };

static const double LONG_TILE = 1.25;

typedef struct {
    int32_t row, first_query, num_queries, position, stop, start, part, part_blocks;
} Item;

typedef struct {
    int32_t first_query, num_queries, first_slot, num_parts;
} Split;

typedef struct {
    int32_t block_m, block_n, wave, min_split;
} Tiling;

typedef struct {
    int32_t window, chunk;
} Mask;

typedef struct {
    Py_buffer query_start_loc, seq_lens, seq_starts, range_ends;
    int64_t num_reqs, num_tokens, max_query_len;
    int causal, is_static;
} Batch;

typedef struct {
    int tiling;  // its index
    int64_t max_queries, num_tiles;
    Item *tiles;
    int32_t *num_tokens;  // the tokens that each reads, for the current mask
    int64_t length;       // the most blocks of a part; 0 if no tile is split
} Shape;

typedef struct {
    int64_t num_items, num_slots, num_splits, split_queries;
} Capacity;

static inline int64_t at(const Py_buffer *numbers, int64_t index) {
    return *(const int32_t *)((const char *)numbers->buf + index * numbers->strides[0]);
}

static inline int64_t ceil_div(int64_t number, int64_t by) { return (number + by - 1) / by; }
static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }
static inline int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }
static inline int64_t aligned(int64_t numbers) { return ceil_div(numbers, ALIGNMENT) * ALIGNMENT; }

// Return request `row` as a work item; the one after the last request is the padding, which sees no token.
static Item request_of(const Batch *batch, int64_t row) {
    int64_t start = at(&batch->query_start_loc, row);
    if (row == batch->num_reqs) {
        int64_t padding = batch->num_tokens - start;
        return (Item){0, start, padding, -padding, 0, 0, 0, 0};
    }
    int64_t queries = at(&batch->query_start_loc, row + 1) - start, stop = at(&batch->seq_lens, row);
    int64_t hidden = batch->seq_starts.buf ? at(&batch->seq_starts, row) : 0;
    return (Item){row, start, queries, stop - queries, stop, hidden, 0, 0};
}

// Write the tiles of a request of any length; return their number.
static int64_t tile_request(Item request, int64_t queries_per_tile, const Batch *batch, Item *tiles) {
    int64_t count = 0;
    for (int64_t done = 0; done < request.num_queries; done += queries_per_tile, count++) {
        Item tile = request;
        tile.first_query += done;
        tile.position += done;
        tile.num_queries = least(request.num_queries - done, queries_per_tile);
        if (batch->causal) tile.stop = most(tile.position + tile.num_queries, 0);
        // Ranges are disjoint, so no query of a tile sees a later token than its last one.
        if (batch->causal && batch->range_ends.buf)
            tile.stop = most(tile.stop, at(&batch->range_ends, tile.first_query + tile.num_queries - 1));
        tiles[count] = tile;
    }
    return count;
}

static int later_first(const void *one, const void *other) {
    const Item *a = one, *b = other;
    if (a->position != b->position) return a->position > b->position ? -1 : 1;
    return a->first_query < b->first_query ? -1 : 1;
}

static int tiling_for(int64_t rows, const Tiling *tilings, int num_tilings) {
    for (int index = 0; index < num_tilings; index++)
        if (tilings[index].block_m >= rows) return index;
    return num_tilings - 1;
}

// Write the step's tiles, small ones first; return the number of shapes, or -1 if memory cannot be allocated.
static int tiles_of(const Batch *batch, int64_t heads, const Tiling *tilings, int num_tilings, Shape *shapes,
                    Item **items) {
    int last = num_tilings - 1;
    int64_t limit = least(MAX_SMALL_ROWS, tilings[last].block_m) / heads, longest_small = 0;
    int is_one_shape = batch->max_query_len <= limit;
    int only = tiling_for(batch->max_query_len * heads, tilings, num_tilings);
    int64_t per_tile = tilings[is_one_shape ? only : last].block_m / heads;
    if (is_one_shape) limit = per_tile;
    int64_t num_small = 0, num_large = 0, capacity = 0;
    for (int64_t row = 0; row <= batch->num_reqs; row++) {
        int64_t queries = request_of(batch, row).num_queries;
        if (queries > 0) capacity += queries > limit ? ceil_div(queries, per_tile) : 1;
    }
    Item *tiles = *items = malloc((capacity + 1) * sizeof(Item));
    if (!tiles) return -1;
    Item *large = tiles + capacity;  // filled from the end
    for (int64_t row = 0; row <= batch->num_reqs; row++) {
        Item request = request_of(batch, row);
        if (request.num_queries <= 0) continue;
        if (request.num_queries <= limit) {
            tiles[num_small++] = request;
            longest_small = most(longest_small, request.num_queries);
        } else {
            int64_t count = ceil_div(request.num_queries, per_tile);
            large -= count;
            num_large += tile_request(request, per_tile, batch, large);
        }
    }
    qsort(large, num_large, sizeof(Item), later_first);
    if (is_one_shape) {
        shapes[0] = (Shape){only, batch->max_query_len, capacity, tiles};
        return 1;
    }
    Shape of_large = {last, per_tile, num_large, large};
    if (!batch->is_static && !num_small) {
        shapes[0] = of_large;
        return 1;
    }
    if (!batch->is_static) limit = longest_small;
    shapes[0] = (Shape){tiling_for(limit * heads, tilings, num_tilings), limit, num_small, tiles};
    shapes[1] = of_large;
    return 2;
}
