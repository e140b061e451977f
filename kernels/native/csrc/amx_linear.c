/* Matrix products in AMX tiles: bf16 activations by bf16, int8 or int4 weights.
 *
 * A tile product sums 32 inputs for each output in an order that the processor fixes, whatever the number of rows in the
 * tile: a row's result is the same bits in every batch here too. Quantized weights are scaled and rounded to bf16 on
 * their way from memory, which loses less than rounding activations to bytes would, and costs nothing next to the memory. */

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
    TILE_CONFIGURE(config);
}

enum { TILE_BYTES = 1024, TILE_INPUTS = 32, FEW_STEPS = 2, SPANS_AHEAD = 2 };

struct tiled {
    const struct linear_job *job;
    const char *x;     /* [num_rows, x_stride bytes], inputs padded with zeros */
    int64_t x_stride;
    int64_t steps;     /* tiles along the inputs */
    size_t bytes;      /* of a panel */
};

/* Where weights are read from: the panels themselves, or a place that they were unpacked to. */
struct panels {
    const char *data;
    size_t stride; /* bytes from panel to panel */
};

/* ---- whole numbers to bf16 ----
 *
 * They become half-precision floats, 32 at a time, are scaled and, shifted right by three, read as bf16: the exponents
 * then mean 2^112 less. Activations are taken times 2^64 beforehand, so that products stay far from the limits of
 * float32, and results are put right by one last factor. */

#define ACTIVATION_FACTOR 0x1p64f
#define RESULT_FACTOR 0x1p40f /* 2^112 / 2^64, and weights come 2^8 too large: see INT4_FACTOR, and high_bytes */

INLINE __m512i bf16_of_half(__m512h scaled)
{
    const __m512i half = _mm512_set1_epi16(4), sign_and_rest = _mm512_set1_epi16((short)0x8fff);
    return _mm512_and_si512(_mm512_srai_epi16(_mm512_add_epi16((__m512i)scaled, half), 3), sign_and_rest);
}

/* 16 half-precision numbers, each twice. */
INLINE __m512h load_twice(const char *halves)
{
    __m512i once = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves));
    return (__m512h)_mm512_or_si512(once, _mm512_slli_epi32(once, 16));
}

INLINE void unpack_int8_tile(const char *span, int second, char *to)
{
    const char *whole = span + 4 * PANEL + second * GROUP * PANEL;
    __m512h scales = load_twice(span + second * 2 * PANEL);
    UNROLL for (int pair = 0; pair < 8; pair++) {
        __m512i bytes = _mm512_loadu_si512(whole + pair * 64), high_bytes = _mm512_set1_epi16((short)0xff00);
        __m512i low = _mm512_slli_epi16(bytes, 8), high = _mm512_and_si512(bytes, high_bytes);
        _mm512_store_si512(to + pair * 128, bf16_of_half(_mm512_mul_ph(_mm512_cvtepi16_ph(low), scales)));
        _mm512_store_si512(to + pair * 128 + 64, bf16_of_half(_mm512_mul_ph(_mm512_cvtepi16_ph(high), scales)));
    }
}

INLINE void unpack_int4_tile(const char *span, int second, char *to)
{
    const char *whole = span + 8 * PANEL + second * GROUP * PANEL / 2;
    __m512h scales = load_twice(span + second * 2 * PANEL), least = load_twice(span + (2 + second) * 2 * PANEL);
    UNROLL for (int four = 0; four < 4; four++) {
        __m512i words = _mm512_loadu_si512(whole + four * 64);
        UNROLL for (int part = 0; part < 4; part++) {
            __m512i q = _mm512_and_si512(_mm512_srli_epi16(words, 4 * part), _mm512_set1_epi16(15));
            __m512h weights = _mm512_fmadd_ph(_mm512_cvtepi16_ph(q), scales, least);
            _mm512_store_si512(to + (4 * four + part) * 64, bf16_of_half(weights));
        }
    }
}

/* Tiles `first` to `first + count` of one panel; both even. */
INLINE void unpack_tiles(const char *panel, int kind, int64_t first, int64_t count, char *to)
{
    size_t bytes = span_bytes(kind);
    for (int64_t s = first; s < first + count; s += 2, to += 2 * TILE_BYTES) {
        const char *span = panel + (size_t)(s / 2) * bytes;
        for (size_t line = 0; line < bytes; line += 64)
            _mm_prefetch(span + SPANS_AHEAD * bytes + line, _MM_HINT_T0);
        UNROLL for (int second = 0; second < 2; second++)
            if (kind == KIND_INT8)
                unpack_int8_tile(span, second, to + second * TILE_BYTES);
            else
                unpack_int4_tile(span, second, to + second * TILE_BYTES);
    }
}

static struct panels unpacked_panels(const struct tiled *t, int64_t panel, int64_t count)
{
    const char *data = (const char *)t->job->weight->data + (size_t)panel * t->bytes;
    if (!is_quantized(t->job->weight->kind))
        return (struct panels){data, t->bytes};
    size_t stride = (size_t)t->steps * TILE_BYTES;
    char *to = scratch(SCRATCH_TILE, (size_t)count * stride);
    for (int64_t p = 0; p < count; p++)
        unpack_tiles(data + (size_t)p * t->bytes, t->job->weight->kind, 0, t->steps, to + (size_t)p * stride);
    return (struct panels){to, stride};
}

/* ---- results ---- */

/* One panel's sums of some rows, put right and stored. */
static __attribute__((noinline)) void store_any_sums(const struct linear_job *job, const float *sums, int64_t row, int rows,
                                                     int64_t panel, vf factor, vf bias)
{
    int64_t output = panel * PANEL;
    for (int r = 0; output < job->weight->num_outputs && r < rows; r++)
        store_row(&job->out, row + r, output, job->weight->num_outputs, vfma(vload(sums + r * 16), factor, bias));
}

INLINE void store_sums(const struct linear_job *job, const float *sums, int64_t row, int rows, int64_t panel)
{
    int64_t output = panel * PANEL, stride = job->out.stride;
    const struct weight *w = job->weight;
    vf factor = vset(is_quantized(w->kind) ? RESULT_FACTOR : 1.0f), bias = w->bias ? vload(w->bias + output) : vset(0);
    if (job->out.dtype != BF16 || output + PANEL > w->num_outputs) {
        store_any_sums(job, sums, row, rows, panel, factor, bias);
        return;
    }
    uint16_t *to = (uint16_t *)job->out.data + row * stride + output;
    for (int r = 0; r < rows; r++, to += stride)
        vstore_bf16(to, vfma(vload(sums + r * 16), factor, bias));
}

#define STORE_RESULTS(tile, row, rows, panel)                      \
    do {                                                        \
        float sums[256] __attribute__((aligned(64)));           \
        TILE_STORE(tile, sums, 64);                           \
        store_sums(t->job, sums, row, rows, panel);             \
    } while (0)

static void zero_results(void)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

/* ---- blocks ---- */

INLINE void add_many(const char *x, int64_t x_stride, struct panels w, int64_t steps)
{
    const char *below = x + 16 * x_stride;
    for (int64_t s = 0; s < steps; s++) {
        TILE_LOAD(6, w.data + s * TILE_BYTES, 64);
        TILE_LOAD(4, x + s * 64, x_stride);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, w.data + w.stride + s * TILE_BYTES, 64);
        TILE_MULTIPLY(1, 4, 7);
        TILE_LOAD(5, below + s * 64, x_stride);
        TILE_MULTIPLY(2, 5, 6);
        TILE_MULTIPLY(3, 5, 7);
    }
}

INLINE void store_many(const struct tiled *t, int64_t row, int lower, int64_t panel, int64_t apart)
{
    STORE_RESULTS(0, row, 16, panel);
    STORE_RESULTS(1, row, 16, panel + apart);
    STORE_RESULTS(2, row + 16, lower, panel);
    STORE_RESULTS(3, row + 16, lower, panel + apart);
}

/* 16 + `lower` rows by two panels */
static void multiply_many(const struct tiled *t, int64_t row, int lower, struct panels w, int64_t panel)
{
    zero_results();
    add_many(t->x + row * t->x_stride, t->x_stride, w, t->steps);
    store_many(t, row, lower, panel, 1);
}

/* All rows, 16 + `lower`, by two panels of quantized weights: unpacked for these alone, they need no more room than the
 * nearest cache has. */
static void multiply_once(const struct tiled *t, int lower, int64_t panel, int64_t apart)
{
    const char *data = (const char *)t->job->weight->data + (size_t)panel * t->bytes;
    char buffer[2 * FEW_STEPS * TILE_BYTES] __attribute__((aligned(64)));
    zero_results();
    for (int64_t s = 0; s < t->steps; s += FEW_STEPS) {
        for (int p = 0; p < 2; p++)
            unpack_tiles(data + (size_t)(p * apart) * t->bytes, t->job->weight->kind, s, FEW_STEPS,
                         buffer + p * FEW_STEPS * TILE_BYTES);
        add_many(t->x + s * 64, t->x_stride, (struct panels){buffer, FEW_STEPS * TILE_BYTES}, FEW_STEPS);
    }
    store_many(t, 0, lower, panel, apart);
}

INLINE void add_few(const char *x, int64_t x_stride, struct panels w, int64_t steps)
{
    for (int64_t s = 0; s < steps; s++) {
        TILE_LOAD(4, x + s * 64, x_stride);
        TILE_LOAD(6, w.data + s * TILE_BYTES, 64);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, w.data + w.stride + s * TILE_BYTES, 64);
        TILE_MULTIPLY(1, 4, 7);
        TILE_LOAD(6, w.data + 2 * w.stride + s * TILE_BYTES, 64);
        TILE_MULTIPLY(2, 4, 6);
        TILE_LOAD(7, w.data + 3 * w.stride + s * TILE_BYTES, 64);
        TILE_MULTIPLY(3, 4, 7);
    }
}

/* At most 16 rows by four panels that lie `apart` from each other: each is the next of a long run, which the memory
 * delivers ahead of time. Quantized weights pass through a buffer that stays in the nearest cache. */
static void multiply_few(const struct tiled *t, int64_t row, int rows, int64_t panel, int64_t apart)
{
    const char *x = t->x + row * t->x_stride, *data = (const char *)t->job->weight->data + (size_t)panel * t->bytes;
    size_t stride = (size_t)apart * t->bytes;
    zero_results();
    int kind = t->job->weight->kind;
    if (is_quantized(kind)) {
        char buffer[PANEL_GROUP * FEW_STEPS * TILE_BYTES] __attribute__((aligned(64)));
        for (int64_t s = 0; s < t->steps; s += FEW_STEPS) {
            for (int p = 0; p < PANEL_GROUP; p++)
                unpack_tiles(data + (size_t)p * stride, kind, s, FEW_STEPS, buffer + p * FEW_STEPS * TILE_BYTES);
            add_few(x + s * 64, t->x_stride, (struct panels){buffer, FEW_STEPS * TILE_BYTES}, FEW_STEPS);
        }
    } else {
        add_few(x, t->x_stride, (struct panels){data, stride}, t->steps);
    }
    STORE_RESULTS(0, row, rows, panel);
    STORE_RESULTS(1, row, rows, panel + apart);
    STORE_RESULTS(2, row, rows, panel + 2 * apart);
    STORE_RESULTS(3, row, rows, panel + 3 * apart);
}

/* Rows in blocks of 32 over two panels at a time; what is left below 32 in one or two tiles. */
static void tile_panels(void *context, int64_t item)
{
    const struct tiled *t = context;
    int64_t first = item * t->job->panels_per_item;
    int64_t end = min_int(first + t->job->panels_per_item, count_panels(t->job->weight->num_outputs));
    if (is_quantized(t->job->weight->kind) && t->job->num_rows > 16 && t->job->num_rows <= 32) {
        int lower = (int)t->job->num_rows - 16;
        configure_tiles(16, lower);
        for (int64_t panel = first, apart = (end - first) / 2; panel < first + apart; panel++)
            multiply_once(t, lower, panel, apart);
        TILE_RELEASE();
        return;
    }
    int64_t rest = t->job->num_rows % 32, whole = t->job->num_rows - rest, lower = rest > 16 ? rest - 16 : 0;
    if (whole > 0)
        configure_tiles(16, 16);
    for (int64_t panel = first; whole + lower > 0 && panel < end; panel += 2) {
        struct panels w = unpacked_panels(t, panel, 2);
        if (whole > 0 && lower > 0)
            configure_tiles(16, 16);
        for (int64_t row = 0; row < whole; row += 32)
            multiply_many(t, row, 16, w, panel);
        if (lower > 0) {
            configure_tiles(16, (int)lower);
            multiply_many(t, whole, (int)lower, w, panel);
        }
    }
    if (rest > 0 && lower == 0) {
        configure_tiles((int)rest, (int)rest);
        for (int64_t panel = first, apart = (end - first) / PANEL_GROUP; panel < first + apart; panel++)
            multiply_few(t, whole, (int)rest, panel, apart);
    }
    TILE_RELEASE();
}

/* ---- activations ---- */

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
        vf factor = vset(is_quantized(job->weight->kind) ? ACTIVATION_FACTOR : 1.0f);
        for (long i = 0; i < n; i += W)
            vstore_bf16(to + i, vmul(load_row(&job->x, row, i, n), factor)); /* the padding is a multiple of W */
        memset(to + round_up(n, W), 0, (size_t)(narrow->padded - round_up(n, W)) * 2);
    }
}

static void prepare_tiles(struct tiled *t, struct linear_job *job)
{
    int64_t n = job->weight->num_inputs, padded = padded_inputs(job->weight->kind, n);
    t->job = job;
    t->bytes = panel_bytes(job->weight->kind, n);
    t->steps = padded / TILE_INPUTS;
    if (!is_quantized(job->weight->kind) && job->x.dtype == BF16 && n == padded) {
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
