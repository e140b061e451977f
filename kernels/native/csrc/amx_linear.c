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

/* Activations, inputs padded with zeros: the caller's rows, or a copy in which every tile lies together. */
struct activations {
    const char *data;
    int64_t row_bytes;  /* rows of a multiple of 16 begin at so many bytes each */
    int64_t in_tile;    /* from a row to the next within a tile */
    int64_t step_bytes; /* from a tile to the next along the inputs */
};

struct tiled {
    const struct linear_job *job;
    struct activations x;
    int64_t steps;     /* tiles along the inputs */
    size_t bytes;      /* of a panel */
    float factor;      /* that puts sums right */
};

/* Where the weights of two panels are read from: the panels themselves, or a place that they were unpacked to. */
struct pair {
    const char *first, *second;
};

/* ---- whole numbers to bf16 ----
 *
 * They become half-precision floats, 32 at a time, are scaled and, shifted right by three, read as bf16: the exponents
 * then mean 2^112 less. Activations are taken times 2^64 beforehand, so that products stay far from the limits of
 * float32, and results are put right by one last factor. */

#define ACTIVATION_FACTOR 0x1p64f
#define RESULT_FACTOR 0x1p40f /* 2^112 / 2^64, and weights come 2^8 too large: see INT4_FACTOR */

INLINE __m512i bf16_of_half(__m512h scaled)
{
    const __m512i half = _mm512_set1_epi16(4), sign_and_rest = _mm512_set1_epi16((short)0x8fff);
    return _mm512_and_si512(_mm512_srai_epi16(_mm512_add_epi16((__m512i)scaled, half), 3), sign_and_rest);
}

/* Of 16 half-precision numbers each twice. */
INLINE __m512h twice(__m256i halves)
{
    __m512i once = _mm512_cvtepu16_epi32(halves);
    return (__m512h)_mm512_or_si512(once, _mm512_slli_epi32(once, 16));
}

/* `whole`: numbers for two tiles; `floats`: the scales of their group */
INLINE void unpack_int8_tiles(const char *whole, const char *floats, char *to)
{
    vf scales = vmul(vload((const float *)floats), vset(INT4_FACTOR));
    __m512h halves = twice(_mm512_cvtps_ph(scales, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    UNROLL for (int four = 0; four < SPAN / 4; four++) {
        __m512i bytes = _mm512_loadu_si512(whole + four * 64);
        __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), high = _mm512_srai_epi16(bytes, 8);
        _mm512_store_si512(to + four * 128, bf16_of_half(_mm512_mul_ph(_mm512_cvtepi16_ph(low), halves)));
        _mm512_store_si512(to + four * 128 + 64, bf16_of_half(_mm512_mul_ph(_mm512_cvtepi16_ph(high), halves)));
    }
}

INLINE void unpack_int4_tile(const char *span, int second, char *to)
{
    const char *whole = span + 8 * PANEL + second * GROUP * PANEL / 2;
    const __m256i *halves = (const __m256i *)span + second;
    __m512h scales = twice(_mm256_loadu_si256(halves)), least = twice(_mm256_loadu_si256(halves + 2));
    UNROLL for (int four = 0; four < 4; four++) {
        __m512i words = _mm512_loadu_si512(whole + four * 64);
        UNROLL for (int part = 0; part < 4; part++) {
            __m512i q = _mm512_and_si512(_mm512_srli_epi16(words, 4 * part), _mm512_set1_epi16(15));
            __m512h weights = _mm512_fmadd_ph(_mm512_cvtepi16_ph(q), scales, least);
            _mm512_store_si512(to + (4 * four + part) * 64, bf16_of_half(weights));
        }
    }
}

INLINE void fetch_lines(const char *from, size_t bytes)
{
    for (size_t line = 0; line < bytes; line += 64)
        _mm_prefetch(from + line, _MM_HINT_T0);
}

/* Tiles `first` to `first + count` of one panel; both even. */
INLINE void unpack_tiles(const char *panel, int kind, int64_t first, int64_t count, char *to)
{
    enum { SPANS = INT8_GROUP / SPAN };
    for (int64_t s = first / 2; s < (first + count) / 2; s++, to += 2 * TILE_BYTES)
        if (kind == KIND_INT8) {
            const char *group = panel + s / SPANS * INT8_GROUP_BYTES;
            const char *whole = group + INT8_HEAD_BYTES + s % SPANS * (SPAN * PANEL);
            fetch_lines(whole + SPANS_AHEAD * (SPAN * PANEL), SPAN * PANEL);
            unpack_int8_tiles(whole, group, to);
        } else {
            const char *span = panel + (size_t)s * INT4_SPAN_BYTES;
            fetch_lines(span + SPANS_AHEAD * INT4_SPAN_BYTES, INT4_SPAN_BYTES);
            unpack_int4_tile(span, 0, to);
            unpack_int4_tile(span, 1, to + TILE_BYTES);
        }
}

INLINE const char *panel_of(const struct tiled *t, int64_t panel)
{
    return (const char *)t->job->weight->data + (size_t)panel * t->bytes;
}

static struct pair unpacked_pair(const struct tiled *t, int64_t panel, int64_t apart)
{
    struct pair w = {panel_of(t, panel), panel_of(t, panel + apart)};
    int kind = t->job->weight->kind;
    if (!is_quantized(kind))
        return w;
    size_t bytes = (size_t)t->steps * TILE_BYTES;
    char *to = scratch(SCRATCH_TILE, 2 * bytes);
    unpack_tiles(w.first, kind, 0, t->steps, to);
    unpack_tiles(w.second, kind, 0, t->steps, to + bytes);
    return (struct pair){to, to + bytes};
}

/* ---- results ---- */

/* Sums of up to 32 rows by two panels `apart` from each other. They are put right and stored while the next ones are
 * multiplied: that keeps other units of the processor busy. */
struct sums {
    float of[2][32][PANEL] __attribute__((aligned(64)));
    int64_t row, panel, apart;
    int count, next;
};

INLINE void store_panel(const struct linear_job *job, int64_t row, int64_t panel, vf x)
{
    int64_t output = panel * PANEL;
    if (job->out.dtype == BF16 && job->then == STORE && output + PANEL <= job->weight->num_outputs)
        vstore_bf16((uint16_t *)job->out.data + row * job->out.stride + output, with_bias(job, output, x));
    else
        store_outputs(job, row, output, x, (enum dtype)job->out.dtype);
}

INLINE void store_sums(const struct tiled *t, const struct sums *sums, int r)
{
    const struct linear_job *job = t->job;
    int64_t row = sums->row + r, output = sums->panel * PANEL, width = job->weight->num_outputs / 2;
    vf x = vmul(vload(sums->of[0][r]), vset(t->factor)), y = vmul(vload(sums->of[1][r]), vset(t->factor));
    if (job->then == GATE) {
        store_row(&job->out, row, output, width, gated(job, output, x, y));
    } else {
        store_panel(job, row, sums->panel, x);
        store_panel(job, row, sums->panel + sums->apart, y);
    }
}

/* Results lie further away than weights and activations do: a store that had to wait for its line would hold up others. */
INLINE void fetch_place(const struct tiled *t, const struct sums *sums, int r)
{
    const struct linear_job *job = t->job;
    const char *place = at(row_of(&job->out, sums->row + r), (size_t)(sums->panel * PANEL), (enum dtype)job->out.dtype);
    if (r < sums->count) {
        _mm_prefetch(place, _MM_HINT_T0);
        if (job->then == ADD)
            _mm_prefetch(place + 64, _MM_HINT_T0);
    }
}

enum { PLACES_AHEAD = 4 };

INLINE void store_some(const struct tiled *t, struct sums *sums, int count)
{
    int end = (int)min_int(sums->next + count, sums->count);
    for (; sums->next < end; sums->next++) {
        fetch_place(t, sums, sums->next + PLACES_AHEAD);
        store_sums(t, sums, sums->next);
    }
}

static __attribute__((noinline)) void store_all(const struct tiled *t, struct sums *sums)
{
    store_some(t, sums, sums->count);
}

/* From tiles `first` and `second`: at most 16 rows by each of the panels. */
#define TAKE_16_ROWS(sums, from, first, second)          \
    do {                                                 \
        TILE_STORE(first, (sums)->of[0][from], 64);      \
        TILE_STORE(second, (sums)->of[1][from], 64);     \
    } while (0)

static void expect_rows(const struct tiled *t, struct sums *sums, int64_t row, int count, int64_t panel, int64_t apart)
{
    sums->row = row;
    sums->panel = panel;
    sums->apart = apart;
    sums->count = count;
    sums->next = 0;
    for (int r = 0; r < PLACES_AHEAD; r++)
        fetch_place(t, sums, r);
}

static void take_all(const struct tiled *t, struct sums *sums, int64_t row, int count, int64_t panel, int64_t apart)
{
    TAKE_16_ROWS(sums, 0, 0, 1);
    TAKE_16_ROWS(sums, 16, 2, 3);
    expect_rows(t, sums, row, count, panel, apart);
}

static void zero_results(void)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

/* ---- blocks ---- */

INLINE const char *rows_from(const struct tiled *t, int64_t row, int64_t step)
{
    return t->x.data + row * t->x.row_bytes + step * t->x.step_bytes;
}

/* Weights stay in the nearest cache while activations pass by. */
INLINE void add_step(const struct activations *x, const char *upper, struct pair w, int64_t s)
{
    const char *lower = upper + 16 * x->row_bytes;
    TILE_LOAD(6, w.first + s * TILE_BYTES, 64);
    TILE_LOAD_PASSING(4, upper, x->in_tile);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, w.second + s * TILE_BYTES, 64);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD_PASSING(5, lower, x->in_tile);
    TILE_MULTIPLY(2, 5, 6);
    TILE_MULTIPLY(3, 5, 7);
}

/* The panels that will be wanted next, fetched from memory bit by bit. */
struct ahead {
    struct pair next;
    int64_t line, lines, lines_per_step;
};

INLINE void fetch_ahead(struct ahead *ahead)
{
    int64_t end = min_int(ahead->line + ahead->lines_per_step, ahead->lines);
    for (; ahead->line < end; ahead->line++) {
        _mm_prefetch(ahead->next.first + ahead->line * 64, _MM_HINT_T1);
        _mm_prefetch(ahead->next.second + ahead->line * 64, _MM_HINT_T1);
    }
}

/* 16 + `lower` rows by two panels. */
static void multiply_many(const struct tiled *t, int64_t row, int lower, struct pair w, int64_t panel, int64_t apart,
                          struct ahead *ahead, struct sums *sums)
{
    int rows_per_step = (int)((31 + t->steps) / t->steps);
    zero_results();
    for (int64_t s = 0; s < t->steps; s++) {
        add_step(&t->x, rows_from(t, row, s), w, s);
        fetch_ahead(ahead);
        store_some(t, sums, rows_per_step);
    }
    store_some(t, sums, sums->count);
    take_all(t, sums, row, 16 + lower, panel, apart);
}

/* All rows, 16 + `lower`, by two panels of quantized weights: unpacked for these alone, they need no more room than the
 * nearest cache has. */
static void multiply_once(const struct tiled *t, int lower, int64_t panel, int64_t apart, struct sums *sums)
{
    int kind = t->job->weight->kind;
    char buffer[2][FEW_STEPS * TILE_BYTES] __attribute__((aligned(64)));
    zero_results();
    for (int64_t s = 0; s < t->steps; s += FEW_STEPS) {
        unpack_tiles(panel_of(t, panel), kind, s, FEW_STEPS, buffer[0]);
        unpack_tiles(panel_of(t, panel + apart), kind, s, FEW_STEPS, buffer[1]);
        for (int i = 0; i < FEW_STEPS; i++)
            add_step(&t->x, rows_from(t, 0, s + i), (struct pair){buffer[0], buffer[1]}, i);
    }
    store_all(t, sums);
    take_all(t, sums, 0, 16 + lower, panel, apart);
}

INLINE void add_few(const struct activations *x, const char *rows, struct pair w, struct pair v, int64_t steps)
{
    for (int64_t s = 0; s < steps; s++) {
        TILE_LOAD(4, rows + s * x->step_bytes, x->in_tile);
        TILE_LOAD(6, w.first + s * TILE_BYTES, 64);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, w.second + s * TILE_BYTES, 64);
        TILE_MULTIPLY(1, 4, 7);
        TILE_LOAD(6, v.first + s * TILE_BYTES, 64);
        TILE_MULTIPLY(2, 4, 6);
        TILE_LOAD(7, v.second + s * TILE_BYTES, 64);
        TILE_MULTIPLY(3, 4, 7);
    }
}

static void add_few_unpacked(const struct tiled *t, int64_t row, struct pair w, struct pair v)
{
    int kind = t->job->weight->kind;
    char buffer[PANEL_GROUP][FEW_STEPS * TILE_BYTES] __attribute__((aligned(64)));
    for (int64_t s = 0; s < t->steps; s += FEW_STEPS) {
        unpack_tiles(w.first, kind, s, FEW_STEPS, buffer[0]);
        unpack_tiles(w.second, kind, s, FEW_STEPS, buffer[1]);
        unpack_tiles(v.first, kind, s, FEW_STEPS, buffer[2]);
        unpack_tiles(v.second, kind, s, FEW_STEPS, buffer[3]);
        add_few(&t->x, rows_from(t, row, s), (struct pair){buffer[0], buffer[1]}, (struct pair){buffer[2], buffer[3]},
                FEW_STEPS);
    }
}

/* At most 16 rows by two pairs of panels, the second `later` than the first: each of the four is the next of a long run,
 * which the memory delivers ahead of time. Quantized weights pass through a buffer that stays in the nearest cache. */
static void multiply_few(const struct tiled *t, int64_t row, int rows, int64_t panel, int64_t apart, int64_t later)
{
    struct pair w = {panel_of(t, panel), panel_of(t, panel + apart)};
    struct pair v = {panel_of(t, panel + later), panel_of(t, panel + later + apart)};
    struct sums sums;
    zero_results();
    if (is_quantized(t->job->weight->kind))
        add_few_unpacked(t, row, w, v);
    else
        add_few(&t->x, rows_from(t, row, 0), w, v, t->steps);
    expect_rows(t, &sums, row, rows, panel, apart);
    TAKE_16_ROWS(&sums, 0, 0, 1);
    store_all(t, &sums);
    expect_rows(t, &sums, row, rows, panel + later, apart);
    TAKE_16_ROWS(&sums, 0, 2, 3);
    store_all(t, &sums);
}

/* ---- sharing out ---- */

/* Pairs of panels: the first ones are `first`, `first + step`, ..., their partners lie `apart`. */
struct share {
    int64_t first, count, step, apart;
};

/* In runs, each panel follows the one before of its kind in memory; otherwise partners are neighbours. */
static struct share share_of(const struct linear_job *job, int64_t item, bool in_runs)
{
    int64_t most = job->panels_per_item / 2, pairs = count_panels(job->weight->num_outputs) / 2;
    int64_t first = item * most, count = min_int(most, pairs - first);
    if (job->then == GATE)
        return (struct share){first, count, 1, pairs};
    return in_runs ? (struct share){2 * first, count, 1, count} : (struct share){2 * first, count, 2, 1};
}

static void multiply_whole(const struct tiled *t, int64_t item, int64_t whole, int64_t lower)
{
    const struct share share = share_of(t->job, item, false);
    int64_t blocks = whole / 32 + (lower > 0);
    struct sums sums = {.count = 0};
    configure_tiles(16, 16);
    for (int64_t i = 0; i < share.count; i++) {
        int64_t panel = share.first + i * share.step, next = share.first + min_int(i + 1, share.count - 1) * share.step;
        struct pair w = unpacked_pair(t, panel, share.apart);
        struct ahead ahead = {{panel_of(t, next), panel_of(t, next + share.apart)}, 0, (int64_t)t->bytes / 64, 0};
        ahead.lines_per_step = ahead.lines / (blocks * t->steps) + 1;
        for (int64_t row = 0; row < whole; row += 32)
            multiply_many(t, row, 16, w, panel, share.apart, &ahead, &sums);
        if (lower > 0) {
            configure_tiles(16, (int)lower);
            multiply_many(t, whole, (int)lower, w, panel, share.apart, &ahead, &sums);
            configure_tiles(16, 16);
        }
    }
    store_all(t, &sums);
}

static void multiply_all_once(const struct tiled *t, int64_t item, int lower)
{
    const struct share share = share_of(t->job, item, true);
    struct sums sums = {.count = 0};
    configure_tiles(16, lower);
    for (int64_t panel = share.first; panel < share.first + share.count; panel++)
        multiply_once(t, lower, panel, share.apart, &sums);
    store_all(t, &sums);
}

static void multiply_rest(const struct tiled *t, int64_t item, int64_t row, int rest)
{
    const struct share share = share_of(t->job, item, true);
    int64_t later = share.count / 2;
    configure_tiles(rest, rest);
    for (int64_t panel = share.first; panel < share.first + later; panel++)
        multiply_few(t, row, rest, panel, share.apart, later);
}

/* Rows in blocks of 32 over two panels at a time; what is left below 32 in one or two tiles. */
static void tile_panels(void *context, int64_t item)
{
    const struct tiled *t = context;
    int64_t num_rows = t->job->num_rows, rest = num_rows % 32, lower = rest > 16 ? rest - 16 : 0;
    if (is_quantized(t->job->weight->kind) && num_rows > 16 && num_rows <= 32) {
        multiply_all_once(t, item, (int)num_rows - 16);
    } else {
        if (num_rows > 16)
            multiply_whole(t, item, num_rows - rest, lower);
        if (rest > 0 && lower == 0)
            multiply_rest(t, item, num_rows - rest, (int)rest);
    }
    TILE_RELEASE();
}

/* ---- activations ---- */

struct narrow_job {
    const struct linear_job *job;
    uint16_t *rows; /* [num_rows / 16, padded / TILE_INPUTS, 16, TILE_INPUTS] */
    int64_t padded;
};

static void narrow_rows(void *context, int64_t item)
{
    const struct narrow_job *narrow = context;
    const struct linear_job *job = narrow->job;
    int kind = job->weight->kind;
    long n = kind == KIND_INT8 ? (long)narrow->padded : (long)job->weight->num_inputs;
    vf factor = vset(is_quantized(kind) ? ACTIVATION_FACTOR : 1.0f);
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++) {
        const float *turned = kind == KIND_INT8 ? turned_row(job, row) : NULL;
        uint16_t *to = narrow->rows + row / 16 * 16 * narrow->padded + row % 16 * TILE_INPUTS;
        for (long i = 0; i < narrow->padded; i += W) /* the padding is a multiple of W */
            vstore_bf16(to + i / TILE_INPUTS * 16 * TILE_INPUTS + i % TILE_INPUTS,
                        i < n ? vmul(turned ? vload(turned + i) : load_row(&job->x, row, i, n), factor) : vset(0));
    }
}

static void prepare_tiles(struct tiled *t, struct linear_job *job)
{
    int64_t n = job->weight->num_inputs, padded = padded_inputs(job->weight->kind, n);
    t->job = job;
    t->factor = is_quantized(job->weight->kind) ? RESULT_FACTOR : 1.0f;
    t->bytes = panel_bytes(job->weight->kind, n);
    t->steps = padded / TILE_INPUTS;
    if (!is_quantized(job->weight->kind) && job->x.dtype == BF16 && n == padded) {
        t->x = (struct activations){job->x.data, job->x.stride * 2, job->x.stride * 2, 2 * TILE_INPUTS};
    } else {
        size_t numbers = (size_t)(round_up(job->num_rows, 16) * padded);
        struct narrow_job narrow = {job, scratch(SCRATCH_ROWS, numbers * 2), padded};
        parallel(row_items(job->num_rows), narrow_rows, &narrow);
        t->x = (struct activations){(const char *)narrow.rows, padded * 2, 2 * TILE_INPUTS, TILE_BYTES};
    }
}

static void linear_tiles(const struct rows *x, int64_t num_rows, const struct weight *weight, enum then then,
                         const struct rows *out)
{
    int64_t num_panels = count_panels(weight->num_outputs);
    int64_t rows_per_pass = min_int(num_rows, 32 * (1 + (1 << 15) / (2 * weight->num_inputs))); /* about 1 MiB */
    for (int64_t row = 0; row < num_rows; row += rows_per_pass) {
        struct linear_job job = {.weight = weight, .then = then, .x = *x, .out = *out};
        struct tiled t;
        job.x.data = row_of(x, row);
        job.out.data = row_of(out, row);
        job.num_rows = min_int(rows_per_pass, num_rows - row);
        job.panels_per_item = panels_per_item(num_panels, job.num_rows);
        prepare_tiles(&t, &job);
        parallel((num_panels + job.panels_per_item - 1) / job.panels_per_item, tile_panels, &t);
    }
}
