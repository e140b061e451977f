/* Matrix products in AMX tiles: bf16 and int8 weights.
 *
 * A tile product sums 32 inputs (bf16) or 64 (int8) for each output in an order that the processor fixes, whatever the
 * number of rows in the tile: a row's result is the same bits in every batch here too. */

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};

/* Tiles 0-3 take results, 4 and 5 activations, 6 and 7 weights. `upper` rows in tiles 0, 1, 4, `lower` in 2, 3, 5. */
static void configure_tiles(int upper, int lower)
{
    struct tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.num_rows[t] = 16;
    }
    config.num_rows[0] = config.num_rows[1] = config.num_rows[4] = (uint8_t)upper;
    config.num_rows[2] = config.num_rows[3] = config.num_rows[5] = (uint8_t)lower;
    _tile_loadconfig(&config);
}

/* One row block of at most 16 rows by four panels: tiles 0-3 all take `rows` rows. */
static void configure_few_tiles(int rows)
{
    configure_tiles(rows, rows);
}

struct tiled {
    const struct linear_job *job;
    const char *x;       /* [num_rows, x_stride bytes], inputs padded with zeros */
    int64_t x_stride;
    int64_t steps;       /* tiles along the inputs */
    size_t bytes;        /* of a panel */
};

INLINE void store_tile_rows(const struct linear_job *job, const int32_t *sums, int64_t row, int rows, int64_t panel)
{
    const struct weight *weight = job->weight;
    int64_t output = panel * PANEL;
    if (output >= weight->num_outputs)
        return;
    for (int r = 0; r < rows; r++) {
        vf value = _mm512_castsi512_ps(_mm512_loadu_si512(sums + 16 * r));
        if (weight->kind == KIND_INT8) {
            value = vmul(_mm512_cvtepi32_ps(_mm512_castps_si512(value)), vload(weight->scales + output));
            value = vmul(value, vset(job->row_scales[row + r]));
        }
        store_outputs(job, row + r, output, value);
    }
}

#define STORE_TILE(tile, row, rows, panel)                                    \
    do {                                                                      \
        int32_t sums[256] __attribute__((aligned(64)));                       \
        _tile_stored(tile, sums, 64);                                         \
        store_tile_rows(t->job, sums, row, rows, panel);                      \
    } while (0)

/* The products of 32 rows by 2 panels, and of up to 16 rows by 4 panels. Macros: tile numbers must be literals. */
#define BLOCK_2X2(name, product)                                                                        \
    static void name(const struct tiled *t, int64_t row, int lower, int64_t panel)                      \
    {                                                                                                   \
        const char *x = t->x + row * t->x_stride, *below = x + 16 * t->x_stride;                        \
        const char *w = (const char *)t->job->weight->data + (size_t)panel * t->bytes;                  \
        _tile_zero(0);                                                                                  \
        _tile_zero(1);                                                                                  \
        _tile_zero(2);                                                                                  \
        _tile_zero(3);                                                                                  \
        for (int64_t s = 0; s < t->steps; s++) {                                                        \
            _tile_loadd(6, w + s * 1024, 64);                                                           \
            _tile_loadd(4, x + s * 64, t->x_stride);                                                    \
            product(0, 4, 6);                                                                           \
            _tile_loadd(7, w + t->bytes + s * 1024, 64);                                                \
            product(1, 4, 7);                                                                           \
            _tile_loadd(5, below + s * 64, t->x_stride);                                                \
            product(2, 5, 6);                                                                           \
            product(3, 5, 7);                                                                           \
        }                                                                                               \
        STORE_TILE(0, row, 16, panel);                                                                  \
        STORE_TILE(1, row, 16, panel + 1);                                                              \
        STORE_TILE(2, row + 16, lower, panel);                                                          \
        STORE_TILE(3, row + 16, lower, panel + 1);                                                      \
    }

#define BLOCK_1X4(name, product)                                                                        \
    static void name(const struct tiled *t, int64_t row, int rows, int64_t panel)                       \
    {                                                                                                   \
        const char *x = t->x + row * t->x_stride;                                                       \
        const char *w = (const char *)t->job->weight->data + (size_t)panel * t->bytes;                  \
        _tile_zero(0);                                                                                  \
        _tile_zero(1);                                                                                  \
        _tile_zero(2);                                                                                  \
        _tile_zero(3);                                                                                  \
        for (int64_t s = 0; s < t->steps; s++) {                                                        \
            _tile_loadd(4, x + s * 64, t->x_stride);                                                    \
            _tile_loadd(6, w + s * 1024, 64);                                                           \
            product(0, 4, 6);                                                                           \
            _tile_loadd(7, w + t->bytes + s * 1024, 64);                                                \
            product(1, 4, 7);                                                                           \
            _tile_loadd(6, w + 2 * t->bytes + s * 1024, 64);                                            \
            product(2, 4, 6);                                                                           \
            _tile_loadd(7, w + 3 * t->bytes + s * 1024, 64);                                            \
            product(3, 4, 7);                                                                           \
        }                                                                                               \
        STORE_TILE(0, row, rows, panel);                                                                \
        STORE_TILE(1, row, rows, panel + 1);                                                            \
        STORE_TILE(2, row, rows, panel + 2);                                                            \
        STORE_TILE(3, row, rows, panel + 3);                                                            \
    }

BLOCK_2X2(tile_2x2_bf16, _tile_dpbf16ps)
BLOCK_2X2(tile_2x2_int8, _tile_dpbssd)
BLOCK_1X4(tile_1x4_bf16, _tile_dpbf16ps)
BLOCK_1X4(tile_1x4_int8, _tile_dpbssd)

static void tile_few_rows(const struct tiled *t, int64_t row, int rows, int64_t panel, int64_t end)
{
    configure_few_tiles(rows);
    for (; panel < end; panel += PANEL_GROUP)
        if (t->job->weight->kind == KIND_INT8)
            tile_1x4_int8(t, row, rows, panel);
        else
            tile_1x4_bf16(t, row, rows, panel);
}

static void tile_many_rows(const struct tiled *t, int64_t row, int lower, int64_t panel)
{
    if (t->job->weight->kind == KIND_INT8)
        tile_2x2_int8(t, row, lower, panel);
    else
        tile_2x2_bf16(t, row, lower, panel);
}

/* Rows in blocks of 32 over two panels at a time; what is left below 32 in one or two tiles. */
static void tile_panels(void *context, int64_t item)
{
    const struct tiled *t = context;
    const struct linear_job *job = t->job;
    int64_t first = item * job->panels_per_item;
    int64_t end = min_int(first + job->panels_per_item, count_panels(job->weight->num_outputs));
    int64_t whole = job->num_rows / 32 * 32, rest = job->num_rows - whole;
    if (whole > 0) {
        configure_tiles(16, 16);
        for (int64_t panel = first; panel < end; panel += 2)
            for (int64_t row = 0; row < whole; row += 32)
                tile_many_rows(t, row, 16, panel);
    }
    if (rest > 16) {
        configure_tiles(16, (int)rest - 16);
        for (int64_t panel = first; panel < end; panel += 2)
            tile_many_rows(t, whole, (int)rest - 16, panel);
    } else if (rest > 0) {
        tile_few_rows(t, whole, (int)rest, first, end);
    }
    _tile_release();
}

struct narrow_job {
    const struct linear_job *job;
    uint16_t *rows;
    int64_t padded;
};

static void narrow_rows(void *context, int64_t item)
{
    const struct narrow_job *narrow = context;
    const struct linear_job *job = narrow->job;
    long n = (long)job->weight->num_inputs;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++) {
        uint16_t *to = narrow->rows + row * narrow->padded;
        for (long i = 0; i < n; i += W)
            vstore_bf16(to + i, load_row(&job->x, row, i, n)); /* the padding is a multiple of W */
        memset(to + round_up(n, W), 0, (size_t)(narrow->padded - round_up(n, W)) * 2);
    }
}

static void prepare_tiles(struct tiled *t, struct linear_job *job)
{
    int64_t n = job->weight->num_inputs, padded = padded_inputs(job->weight->kind, n);
    t->job = job;
    t->bytes = panel_bytes(job->weight->kind, n);
    t->steps = (int64_t)t->bytes / 1024;
    if (job->weight->kind == KIND_INT8) {
        prepare_rows(job);
        t->x = (const char *)job->whole;
        t->x_stride = padded;
    } else if (job->x.dtype == BF16 && n == padded) {
        t->x = job->x.data;
        t->x_stride = job->x.stride * 2;
    } else {
        struct narrow_job narrow = {job, scratch(SCRATCH_ROWS, (size_t)(job->num_rows * padded) * 2), padded};
        parallel(row_items(job->num_rows), narrow_rows, &narrow);
        t->x = (const char *)narrow.rows;
        t->x_stride = padded * 2;
    }
}

static void linear_tiles(const struct rows *x, int64_t num_rows, const struct weight *weight, const struct rows *out)
{
    int64_t num_panels = count_panels(weight->num_outputs);
    int64_t rows_per_pass = min_int(num_rows, 32 * (1 + (1 << 15) / (2 * weight->num_inputs))); /* about 1 MiB */
    for (int64_t row = 0; row < num_rows; row += rows_per_pass) {
        struct linear_job job = {.weight = weight, .x = *x, .out = *out};
        struct tiled t;
        job.x.data = row_of(x, row);
        job.out.data = row_of(out, row);
        job.num_rows = min_int(rows_per_pass, num_rows - row);
        job.panels_per_item = panels_per_item(num_panels, job.num_rows);
        prepare_tiles(&t, &job);
        parallel((num_panels + job.panels_per_item - 1) / job.panels_per_item, tile_panels, &t);
    }
}
