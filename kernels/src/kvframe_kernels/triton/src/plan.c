// Plans a step: one array for each mask, with the numbers of attention_plan.py. Also the function that Python calls.

// Count the parts of a shape's tiles and the split tiles; return the capacity for them.
static Capacity capacity_for(const Shape *shape, Tiling tiling, int64_t heads, const Batch *batch, int *fits) {
    int64_t num_parts = 0, num_splits = 0, part_blocks;
    for (int64_t index = 0; shape->length && index < shape->num_tiles; index++) {
        int64_t parts = parts_of(shape, index, tiling.block_n, &part_blocks);
        num_parts += parts;
        num_splits += parts > 0;
    }
    int64_t num_items = shape->num_tiles - num_splits + num_parts;
    if (!batch->is_static)
        return (Capacity){num_items, num_parts, num_splits, num_splits ? shape->max_queries : 0};
    int64_t per_tile = tiling.block_m / heads;
    int64_t num_tiles = least(batch->num_tokens, batch->num_reqs + 1 + batch->num_tokens / per_tile);
    // The parts of all split tiles fill at most two waves.
    Capacity capacity = {num_tiles + tiling.wave, 2 * tiling.wave, least(tiling.wave, num_tiles), 0};
    capacity.split_queries = capacity.num_splits ? least(per_tile, batch->max_query_len) : 0;
    *fits &= num_items <= capacity.num_items && num_parts <= capacity.num_slots && num_splits <= capacity.num_splits;
    return capacity;
}

static void write_shape(const Shape *shape, int64_t block_n, Item *items, Split *splits) {
    int64_t slot = 0, part_blocks;
    for (int64_t index = 0; shape->length && index < shape->num_tiles; index++) {
        int64_t num_parts = parts_of(shape, index, block_n, &part_blocks);
        if (!num_parts) continue;
        Item tile = shape->tiles[index];
        *splits++ = (Split){tile.first_query, tile.num_queries, slot, num_parts};
        tile.part_blocks = part_blocks;
        for (tile.part = 0; tile.part < num_parts; tile.part++) items[slot++] = tile;
    }
    if (!shape->length) {
        memcpy(items, shape->tiles, shape->num_tiles * sizeof(Item));
        return;
    }
    for (int64_t index = 0; index < shape->num_tiles; index++)
        if (!parts_of(shape, index, block_n, &part_blocks)) items[slot++] = shape->tiles[index];
}

// Return (numbers, ((tiling, first_item, num_items, num_slots, first_split, num_splits, split_queries), ...)).
static PyObject *packed(const Shape *shapes, int num_shapes, const Tiling *tilings, int64_t heads, const Batch *batch) {
    Capacity capacities[MAX_SHAPES];
    int64_t first_items[MAX_SHAPES], first_splits[MAX_SHAPES], end = 0;
    int fits = 1;
    PyObject *programs = PyTuple_New(num_shapes);
    if (!programs) return NULL;
    for (int s = 0; s < num_shapes; s++) {
        Capacity capacity = capacities[s] = capacity_for(&shapes[s], tilings[shapes[s].tiling], heads, batch, &fits);
        first_items[s] = end;
        first_splits[s] = end + aligned(capacity.num_items * ITEM_NUMBERS);
        end = first_splits[s] + aligned(capacity.num_splits * SPLIT_NUMBERS);
        PyObject *place = Py_BuildValue("(iLLLLLL)", shapes[s].tiling, (long long)first_items[s],
                                        (long long)capacity.num_items, (long long)capacity.num_slots,
                                        (long long)first_splits[s], (long long)capacity.num_splits,
                                        (long long)capacity.split_queries);
        if (!place) goto failed;
        PyTuple_SET_ITEM(programs, s, place);
    }
    if (!fits) {
        PyErr_SetString(PyExc_AssertionError, "a step has more parts than there is capacity for in a graph");
        goto failed;
    }
    PyObject *numbers = PyByteArray_FromStringAndSize(NULL, end * sizeof(int32_t));
    if (!numbers) goto failed;
    int32_t *begin = (int32_t *)PyByteArray_AS_STRING(numbers);
    memset(begin, 0, end * sizeof(int32_t));
    for (int s = 0; s < num_shapes; s++)
        write_shape(&shapes[s], tilings[shapes[s].tiling].block_n, (Item *)(begin + first_items[s]),
                    (Split *)(begin + first_splits[s]));
    return Py_BuildValue("(NN)", numbers, programs);
failed:
    Py_DECREF(programs);
    return NULL;
}

// Append the work for a mask to `works` unless it is there already; return its index, or -1.
static Py_ssize_t work_for(Mask mask, const Batch *batch, Shape *shapes, int num_shapes, const Tiling *tilings,
                           int64_t heads, PyObject *works, Py_ssize_t *whole) {
    int is_split = 0;
    for (int s = 0; s < num_shapes; s++) {
        Tiling tiling = tilings[shapes[s].tiling];
        read_tokens(&shapes[s], mask, tiling.block_n);
        shapes[s].length = longest_part(&shapes[s], tiling);
        is_split |= shapes[s].length > 0;
    }
    int is_shared = !is_split && !batch->is_static;
    if (is_shared && *whole >= 0) return *whole;
    PyObject *work = packed(shapes, num_shapes, tilings, heads, batch);
    if (!work) return -1;
    int failed = PyList_Append(works, work);
    Py_DECREF(work);
    if (failed) return -1;
    Py_ssize_t place = PyList_GET_SIZE(works) - 1;
    if (is_shared) *whole = place;
    return place;
}

static int is_same(Mask one, Mask other) {
    return one.window == other.window && one.chunk == other.chunk;
}

// Return (works, the index of each mask's work).
static PyObject *works_for(PyObject *masks, const Batch *batch, Shape *shapes, int num_shapes, const Tiling *tilings,
                           int64_t heads) {
    Py_ssize_t num_masks = PySequence_Fast_GET_SIZE(masks), whole = -1;
    int64_t longest = 0;
    for (int64_t row = 0; row < batch->num_reqs; row++) longest = most(longest, at(&batch->seq_lens, row));
    Mask *known = malloc((num_masks + 1) * sizeof(Mask));
    Py_ssize_t *found = malloc((num_masks + 1) * sizeof(Py_ssize_t));
    PyObject *works = PyList_New(0), *places = PyList_New(num_masks), *result = NULL;
    if (!known || !found || !works || !places) goto done;
    for (Py_ssize_t index = 0; index < num_masks; index++) {
        Mask mask;
        if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(masks, index), "ii", &mask.window, &mask.chunk)) goto done;
        known[index] = mask = in_effect(mask, batch, longest);
        found[index] = -1;
        for (Py_ssize_t other = 0; other < index && !batch->is_static; other++)
            if (is_same(known[other], mask)) found[index] = found[other];
        if (found[index] < 0)
            found[index] = work_for(mask, batch, shapes, num_shapes, tilings, heads, works, &whole);
        PyObject *place = found[index] < 0 ? NULL : PyLong_FromSsize_t(found[index]);
        if (!place) goto done;
        PyList_SET_ITEM(places, index, place);
    }
    result = PyTuple_Pack(2, works, places);
done:
    if (!result && !PyErr_Occurred()) PyErr_NoMemory();
    free(known);
    free(found);
    Py_XDECREF(works);
    Py_XDECREF(places);
    return result;
}

// --- the call from Python --------------------------------------------------------------------------------------------

static int numbers_of(PyObject *array, int64_t least_length, Py_buffer *found) {
    if (PyObject_GetBuffer(array, found, PyBUF_STRIDED_RO)) return 0;
    if (found->ndim == 1 && found->itemsize == sizeof(int32_t) && found->shape[0] >= least_length) return 1;
    PyErr_SetString(PyExc_ValueError, "a step is described by int32 vectors, of one number for each request or token");
    return 0;
}

static PyObject *plan(PyObject *self, PyObject *arguments) {
    PyObject *query_start_loc, *seq_lens, *seq_starts, *range_ends, *masks, *result = NULL;
    Py_buffer tilings = {0};
    long long num_tokens, max_query_len, heads;
    Batch batch = {0};
    if (!PyArg_ParseTuple(arguments, "OOOOLppLOLy*", &query_start_loc, &seq_lens, &seq_starts, &range_ends, &num_tokens,
                          &batch.causal, &batch.is_static, &max_query_len, &masks, &heads, &tilings))
        return NULL;
    batch.num_tokens = num_tokens, batch.max_query_len = max_query_len;
    Item *items = NULL;
    int32_t *num_read = NULL;
    Shape shapes[MAX_SHAPES];
    PyObject *each = PySequence_Fast(masks, "the masks are a sequence");
    if (!each || !numbers_of(seq_lens, 0, &batch.seq_lens)) goto done;
    batch.num_reqs = batch.seq_lens.shape[0];
    if (!numbers_of(query_start_loc, batch.num_reqs + 1, &batch.query_start_loc)) goto done;
    if (seq_starts != Py_None && !numbers_of(seq_starts, batch.num_reqs, &batch.seq_starts)) goto done;
    if (range_ends != Py_None && !numbers_of(range_ends, batch.num_tokens, &batch.range_ends)) goto done;
    int num_tilings = (int)(tilings.len / sizeof(Tiling));
    int num_shapes = tiles_of(&batch, heads, tilings.buf, num_tilings, shapes, &items);
    if (num_shapes > 0) {
        int64_t num_tiles = 0;
        for (int s = 0; s < num_shapes; s++) num_tiles += shapes[s].num_tiles;
        num_read = malloc((num_tiles + 1) * sizeof(int32_t));
    }
    if (!num_read) {
        PyErr_NoMemory();
        goto done;
    }
    shapes[0].num_tokens = num_read;
    if (num_shapes > 1) shapes[1].num_tokens = num_read + shapes[0].num_tiles;
    result = works_for(each, &batch, shapes, num_shapes, tilings.buf, heads);
done:
    free(items);
    free(num_read);
    Py_XDECREF(each);
    PyBuffer_Release(&tilings);
    PyBuffer_Release(&batch.query_start_loc);
    PyBuffer_Release(&batch.seq_lens);
    PyBuffer_Release(&batch.seq_starts);
    PyBuffer_Release(&batch.range_ends);
    return result;
}

static PyMethodDef methods[] = {{"plan", plan, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvframe_kernels_plan", NULL, -1, methods};
PyMODINIT_FUNC PyInit_kvframe_kernels_plan(void) { return PyModule_Create(&module); }
