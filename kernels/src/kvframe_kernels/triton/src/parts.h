// Splits tiles that see much more than a program's fair share into parts.

// Return an equivalent mask for the batch: one that hides no token if `mask` is too wide to hide one.
static Mask in_effect(Mask mask, const Batch *batch, int64_t longest) {
    if (batch->causal && (batch->is_static || longest > (mask.window ? mask.window : mask.chunk))) return mask;
    return (Mask){0, 0};
}

static void read_tokens(Shape *shape, Mask mask, int32_t block_n) {
    for (int64_t index = 0; index < shape->num_tiles; index++) {
        Item tile = shape->tiles[index];
        int32_t low = 0;
        if (mask.chunk)
            low = tile.position < 0 ? 0 : tile.position - tile.position % mask.chunk;
        else if (mask.window)
            low = tile.position + 1 - mask.window;
        low = (int32_t)most(low, tile.start);
        shape->num_tokens[index] = tile.stop - (low & -block_n);
    }
}

// Return the most blocks of tokens of a part of a tile; 0 if no tile is split.
static int64_t longest_part(const Shape *shape, Tiling tiling) {
    int64_t longest = 0, total = 0, num_blocks = 0, length = 0;
    for (int64_t index = 0; index < shape->num_tiles; index++) {
        longest = most(longest, shape->num_tokens[index]);
        total += shape->num_tokens[index];
        num_blocks += ceil_div(shape->num_tokens[index], tiling.block_n);
    }
    if (longest <= tiling.min_split) return 0;
    if (2 * shape->num_tiles <= tiling.wave) {
        // All parts run in one wave: the shortest parts that fit into it. Parts of twice the fair share always fit.
        for (int eighths = 8; eighths <= 16; eighths++) {
            length = (int64_t)ceil((double)num_blocks / tiling.wave * (eighths / 8.0));
            int64_t num_parts = 0;
            for (int64_t index = 0; index < shape->num_tiles; index++)
                num_parts += ceil_div(ceil_div(shape->num_tokens[index], tiling.block_n), length);
            if (num_parts <= tiling.wave) break;
        }
    } else if ((double)(longest * tiling.wave) <= LONG_TILE * total) {
        return 0;
    } else {
        length = ceil_div(total, (int64_t)tiling.wave * tiling.block_n);
    }
    length = most(length, ceil_div(tiling.min_split, tiling.block_n));
    return longest > length * tiling.block_n ? length : 0;
}

// Return the number of parts of a tile, of about equal length and none empty; 0 if it stays whole.
static int64_t parts_of(const Shape *shape, int64_t index, int64_t block_n, int64_t *part_blocks) {
    int64_t num_tokens = shape->num_tokens[index];
    if (!shape->length || num_tokens <= shape->length * block_n) return 0;
    int64_t num_blocks = ceil_div(num_tokens, block_n);
    *part_blocks = ceil_div(num_blocks, ceil_div(num_blocks, shape->length));
    return ceil_div(num_blocks, *part_blocks);
}
