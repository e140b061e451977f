/* y = x W^T + b.
 *
 * Every output element is one chain of multiply-adds over the inputs in order (int8: over groups of inputs, whose sums
 * of whole numbers are exact), whatever the number of rows, the blocking and the threads: a row's result is the same
 * bits in every batch. Weights are read once for all rows of a block; with one row this runs at the memory's speed. */

#define VPP (PANEL / W) /* vectors per panel */

#if defined(ISA_AMX)
enum { USES_TILES = 1 }; /* for bf16 and int8 */
#else
enum { USES_TILES = 0 };
#endif

INLINE int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

INLINE int64_t padded_inputs(int kind, int64_t num_inputs)
{
    return kind == KIND_INT8 ? round_up(num_inputs, SPAN) : kind == KIND_BF16 ? round_up(num_inputs, 32) : num_inputs;
}

/* Whole groups of panels, so that blocks need no narrow cases: the surplus is zero and never stored. */
INLINE int64_t count_panels(int64_t num_outputs)
{
    return round_up(num_outputs, PANEL * PANEL_GROUP) / PANEL;
}

INLINE size_t panel_bytes(int kind, int64_t num_inputs)
{
    size_t padded = (size_t)padded_inputs(kind, num_inputs);
    if (kind == KIND_INT8)
        return padded / SPAN * SPAN_BYTES;
    return padded * PANEL * (kind == KIND_F32 ? 4 : 2);
}

/* ---- packing ---- */

#if defined(ISA_AVX512) && !defined(ISA_AMX)
enum { WEIGHT_OFFSET = 128 }; /* vpdpbusd multiplies unsigned by signed */
#else
enum { WEIGHT_OFFSET = 0 };
#endif

/* Where the whole number of input k of a group and of an output of the panel lies. */
INLINE int place_of(int k, int lane)
{
#if defined(ISA_AMX)
    return k / 4 * PANEL * 4 + lane * 4 + k % 2 * 2 + k / 2 % 2; /* bytes of a word go to neighbouring rows of a tile */
#else
    return k / 4 * PANEL * 4 + lane * 4 + k % 4;
#endif
}

struct pack_job {
    const void *weight;
    enum dtype dtype;
    int64_t num_outputs, num_inputs;
    int kind;
    void *data;
};

INLINE float scalar_at(const void *p, size_t i, enum dtype dtype)
{
    float lanes[W];
    vstore(lanes, vload_part(at(p, i, dtype), 1, dtype));
    return lanes[0];
}

/* The scale as it is stored: the largest magnitude becomes 127, or a little less when half precision rounds up. */
INLINE uint16_t group_scale(float highest, float *scale)
{
    uint16_t half[W];
    float wide[W];
    vstore_f16(half, vset(highest / 127.0f));
    vstore(wide, vload_f16(half));
    if (wide[0] * 127.0f < highest) { /* never beyond 127 */
        half[0]++;
        vstore(wide, vload_f16(half));
    }
    *scale = wide[0];
    return half[0];
}

/* One output's inputs from `start` on, at most GROUP of them. */
static void pack_int8_group(const struct pack_job *job, const void *row, int64_t start, int8_t *span, int lane)
{
    float x[GROUP] = {0}, highest = 0, scale;
    long n = (long)job->num_inputs;
    for (long i = start; i < start + GROUP && i < n; i++) {
        x[i - start] = scalar_at(row, (size_t)i, job->dtype);
        highest = fmaxf(highest, fabsf(x[i - start]));
    }
    int second = (int)(start % SPAN / GROUP);
    ((uint16_t *)span)[second * PANEL + lane] = group_scale(highest, &scale);
    int8_t *whole = span + 4 * PANEL + second * GROUP * PANEL;
    for (int k = 0; k < GROUP; k++) {
        int value = scale > 0 ? (int)rintf(x[k] / scale) : 0;
        whole[place_of(k, lane)] = (int8_t)(value ^ WEIGHT_OFFSET);
    }
}

static void pack_int8_panel(const struct pack_job *job, int64_t index, int8_t *panel)
{
    int64_t padded = padded_inputs(KIND_INT8, job->num_inputs);
    for (int64_t start = 0; start < padded; start += SPAN)
        memset(panel + start / SPAN * SPAN_BYTES + 4 * PANEL, WEIGHT_OFFSET, SPAN * PANEL);
    for (int lane = 0; lane < PANEL && index * PANEL + lane < job->num_outputs; lane++) {
        const void *row = at(job->weight, (size_t)((index * PANEL + lane) * job->num_inputs), job->dtype);
        for (int64_t start = 0; start < padded; start += GROUP)
            pack_int8_group(job, row, start, panel + start / SPAN * SPAN_BYTES, lane);
    }
}

static void pack_float_row(const struct pack_job *job, int64_t output, void *panel, int lane)
{
    const void *row = at(job->weight, (size_t)(output * job->num_inputs), job->dtype);
    for (long i = 0; i < job->num_inputs; i++) {
        if (job->kind == KIND_BF16)
            ((uint16_t *)panel)[i / 2 * PANEL * 2 + lane * 2 + i % 2] = ((const uint16_t *)row)[i];
        else if (job->kind == KIND_F16)
            ((uint16_t *)panel)[i * PANEL + lane] = ((const uint16_t *)row)[i];
        else
            ((float *)panel)[i * PANEL + lane] = scalar_at(row, (size_t)i, job->dtype);
    }
}

static void pack_panel(void *context, int64_t index)
{
    const struct pack_job *job = context;
    size_t bytes = panel_bytes(job->kind, job->num_inputs);
    char *panel = (char *)job->data + (size_t)index * bytes;
    memset(panel, 0, bytes);
    if (job->kind == KIND_INT8)
        pack_int8_panel(job, index, (int8_t *)panel);
    for (int lane = 0; job->kind != KIND_INT8 && lane < PANEL && index * PANEL + lane < job->num_outputs; lane++)
        pack_float_row(job, index * PANEL + lane, panel, lane);
}

static void pack(const void *weight, int dtype, int64_t num_outputs, int64_t num_inputs, int kind, void *data)
{
    struct pack_job job = {weight, (enum dtype)dtype, num_outputs, num_inputs, kind, data};
    parallel(count_panels(num_outputs), pack_panel, &job);
}

/* ---- activations ---- */

struct linear_job {
    const struct weight *weight;
    struct rows x;   /* what the caller gave, beginning at the first row of the pass */
    struct rows out;
    int64_t num_rows;
    const float *wide;   /* [num_rows, wide_stride] */
    int64_t wide_stride;
    int8_t *whole;       /* int8: [num_rows, padded inputs] */
    float *scales;       /* int8: [num_rows, padded inputs / GROUP] */
    int32_t *starts;     /* int8: what makes up for WEIGHT_OFFSET, likewise */
    int64_t panels_per_item;
};

static void widen_rows(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    long n = (long)job->weight->num_inputs;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        for (long i = 0; i < n; i += W)
            vstore_at((float *)job->wide + row * job->wide_stride, i, n, load_row(&job->x, row, i, n), F32);
}

/* A number that is not finite makes the group's scale NaN: whole numbers could not show it. */
INLINE float quantize_group(const struct linear_job *job, int64_t row, int64_t start, int8_t *whole, int32_t *sum)
{
    vf x[GROUP / W], highest = vset(0), spoilt = vset(0);
    long n = (long)job->weight->num_inputs;
    UNROLL for (int i = 0; i < GROUP / W; i++) {
        x[i] = start + i * W < n ? load_row(&job->x, row, start + i * W, n) : vset(0);
        highest = vmax(highest, vabs(x[i]));
        spoilt = vfma(x[i], vset(0), spoilt);
    }
    float most = vhighest(highest);
    vf inverse = vset(most > 0 ? 127.0f / most : 0.0f);
    UNROLL for (int i = 0; i < GROUP / W; i++)
        vstore_int8(whole + i * W, vmul(x[i], inverse));
    *sum = 0;
    for (int i = 0; i < GROUP; i++)
        *sum += whole[i];
    return (most + vsum(spoilt)) / 127.0f;
}

static void quantize_rows(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM, padded = padded_inputs(KIND_INT8, job->weight->num_inputs);
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        for (int64_t g = 0; g < padded / GROUP; g++) {
            int32_t sum;
            float scale = quantize_group(job, row, g * GROUP, job->whole + row * padded + g * GROUP, &sum);
            job->scales[row * (padded / GROUP) + g] = scale;
            job->starts[row * (padded / GROUP) + g] = -WEIGHT_OFFSET * sum;
        }
}

/* ---- one block of rows by a few panels ---- */

INLINE void store_outputs(const struct linear_job *job, int64_t row, int64_t output, vf value)
{
    const struct weight *w = job->weight;
    if (w->bias != NULL)
        value = vadd(value, vload(w->bias + output));
    if (output < w->num_outputs)
        store_row(&job->out, row, output, w->num_outputs, value);
}

INLINE void load_weights(const char *panel, int kind, int64_t pair, int vector, vf *first, vf *second)
{
    if (kind == KIND_BF16) {
        vload_bf16_pairs((const uint16_t *)panel + (pair * PANEL + vector * W) * 2, first, second);
    } else {
        enum dtype dtype = kind == KIND_F32 ? F32 : F16;
        *first = vload_any(at(panel, (size_t)(2 * pair * PANEL + vector * W), dtype), dtype);
        *second = vload_any(at(panel, (size_t)((2 * pair + 1) * PANEL + vector * W), dtype), dtype);
    }
}

INLINE vf load_last_weights(const char *panel, int kind, int64_t input, int vector)
{
    vf first, second;
    if (kind == KIND_F32)
        return vload((const float *)panel + input * PANEL + vector * W);
    if (kind == KIND_F16)
        return vload_f16((const uint16_t *)panel + input * PANEL + vector * W);
    vload_bf16_pairs((const uint16_t *)panel + (input / 2 * PANEL + vector * W) * 2, &first, &second);
    return first;
}

INLINE void multiply(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels,
                     const int kind)
{
    const int64_t inputs = job->weight->num_inputs, stride = job->wide_stride;
    const size_t bytes = panel_bytes(kind, inputs);
    const char *w = (const char *)job->weight->data + (size_t)panel * bytes;
    const float *x = job->wide + row * stride;
    vf sums[12][4 * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = vset(0);
    for (int64_t pair = 0; pair < inputs / 2; pair++) {
        vf first[4 * VPP], second[4 * VPP];
        UNROLL for (int c = 0; c < panels * VPP; c++)
            load_weights(w + (size_t)(c / VPP) * bytes, kind, pair, c % VPP, &first[c], &second[c]);
        UNROLL for (int r = 0; r < rows; r++) {
            vf x0 = vset(x[r * stride + 2 * pair]), x1 = vset(x[r * stride + 2 * pair + 1]);
            UNROLL for (int c = 0; c < panels * VPP; c++)
                sums[r][c] = vfma(x1, second[c], vfma(x0, first[c], sums[r][c]));
        }
    }
    if (inputs % 2)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < panels * VPP; c++)
                sums[r][c] = vfma(vset(x[r * stride + inputs - 1]),
                                  load_last_weights(w + (size_t)(c / VPP) * bytes, kind, inputs - 1, c % VPP), sums[r][c]);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            store_outputs(job, row + r, panel * PANEL + c * W, sums[r][c]);
}

#if defined(ISA_AVX512)
typedef __m512i wholes;
INLINE wholes all_wholes(int32_t x) { return _mm512_set1_epi32(x); }
INLINE wholes dot4(wholes sums, int32_t x, const int8_t *w)
{
    return _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(w), _mm512_set1_epi32(x));
}
INLINE vf as_floats(wholes sums) { return _mm512_cvtepi32_ps(sums); }
#elif defined(ISA_AVX2)
typedef __m256i wholes;
INLINE wholes all_wholes(int32_t x) { return _mm256_set1_epi32(x); }
/* |x| times w with the sign of x: pairs stay within 2 * 127 * 127, so that nothing saturates. */
INLINE wholes dot4(wholes sums, int32_t x, const int8_t *w)
{
    __m256i spread = _mm256_set1_epi32(x), weights = _mm256_loadu_si256((const __m256i *)w);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(spread), _mm256_sign_epi8(weights, spread));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vf as_floats(wholes sums) { return _mm256_cvtepi32_ps(sums); }
#else
typedef vi wholes;
INLINE wholes all_wholes(int32_t x) { return (wholes){x, x, x, x}; }
INLINE wholes dot4(wholes sums, int32_t x, const int8_t *w)
{
    int8_t bytes[4];
    memcpy(bytes, &x, 4);
    for (int i = 0; i < W; i++)
        sums[i] += bytes[0] * w[4 * i] + bytes[1] * w[4 * i + 1] + bytes[2] * w[4 * i + 2] + bytes[3] * w[4 * i + 3];
    return sums;
}
INLINE vf as_floats(wholes sums) { return __builtin_convertvector(sums, vf); }
#endif

INLINE int32_t four_bytes(const int8_t *p)
{
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* A group's products are summed exactly, then scaled and added to the chain of the output. */
INLINE void multiply_int8(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels)
{
    const int64_t padded = padded_inputs(KIND_INT8, job->weight->num_inputs), groups = padded / GROUP;
    const size_t bytes = panel_bytes(KIND_INT8, padded);
    const char *w = (const char *)job->weight->data + (size_t)panel * bytes;
    const int8_t *x = job->whole + row * padded;
    vf sums[6][4 * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = vset(0);
    for (int64_t g = 0; g < groups; g++) {
        const char *span = w + g / 2 * SPAN_BYTES;
        const int8_t *whole = (const int8_t *)span + 4 * PANEL + g % 2 * GROUP * PANEL;
        wholes dots[6][4 * VPP];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < panels * VPP; c++)
                dots[r][c] = all_wholes(job->starts[(row + r) * groups + g]);
        UNROLL for (int four = 0; four < GROUP / 4; four++)
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int c = 0; c < panels * VPP; c++)
                    dots[r][c] = dot4(dots[r][c], four_bytes(x + r * padded + g * GROUP + 4 * four),
                                      whole + (size_t)(c / VPP) * bytes + (four * PANEL + c % VPP * W) * 4);
        UNROLL for (int c = 0; c < panels * VPP; c++) {
            const uint16_t *halves = (const uint16_t *)(span + (size_t)(c / VPP) * bytes) + g % 2 * PANEL;
            vf scale = vload_f16(halves + c % VPP * W);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][c] = vfma(as_floats(dots[r][c]), vmul(scale, vset(job->scales[(row + r) * groups + g])), sums[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            store_outputs(job, row + r, panel * PANEL + c * W, sums[r][c]);
}

#define BLOCK(rows, panels)                                                                                  \
    static __attribute__((noinline)) void block_##rows##_##panels(const struct linear_job *job, int64_t row, \
                                                                  int64_t panel)                             \
    {                                                                                                        \
        if (job->weight->kind == KIND_F32)                                                                   \
            multiply(job, row, panel, rows, panels, KIND_F32);                                               \
        else if (!USES_TILES && job->weight->kind == KIND_BF16)                                              \
            multiply(job, row, panel, rows, panels, KIND_BF16);                                              \
        else                                                                                                 \
            multiply(job, row, panel, rows, panels, KIND_F16);                                               \
    }
#define INT8_BLOCK(rows, panels)                                                                             \
    static __attribute__((noinline)) void int8_##rows##_##panels(const struct linear_job *job, int64_t row,  \
                                                                 int64_t panel)                              \
    {                                                                                                        \
        if (!USES_TILES)                                                                                     \
            multiply_int8(job, row, panel, rows, panels);                                                    \
    }

/* By the number of rows, beginning with one; `panels` is how many a block takes. */
struct block {
    void (*multiply)(const struct linear_job *, int64_t row, int64_t panel);
    int panels;
};

#if defined(ISA_AVX512)
BLOCK(1, 4) BLOCK(2, 4) BLOCK(3, 4)
BLOCK(4, 2) BLOCK(5, 2) BLOCK(6, 2) BLOCK(7, 2) BLOCK(8, 2) BLOCK(9, 2) BLOCK(10, 2) BLOCK(11, 2) BLOCK(12, 2)
static const struct block blocks[] = {{block_1_4, 4}, {block_2_4, 4}, {block_3_4, 4}, {block_4_2, 2},
                                      {block_5_2, 2}, {block_6_2, 2}, {block_7_2, 2}, {block_8_2, 2},
                                      {block_9_2, 2}, {block_10_2, 2}, {block_11_2, 2}, {block_12_2, 2}};
INT8_BLOCK(1, 4) INT8_BLOCK(2, 4) INT8_BLOCK(3, 4) INT8_BLOCK(4, 2) INT8_BLOCK(5, 2) INT8_BLOCK(6, 2)
static const struct block int8_blocks[] = {{int8_1_4, 4}, {int8_2_4, 4}, {int8_3_4, 4},
                                           {int8_4_2, 2}, {int8_5_2, 2}, {int8_6_2, 2}};
#elif defined(ISA_AVX2)
BLOCK(1, 2) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1)
static const struct block blocks[] = {{block_1_2, 2}, {block_2_1, 1}, {block_3_1, 1}, {block_4_1, 1}};
INT8_BLOCK(1, 2) INT8_BLOCK(2, 1)
static const struct block int8_blocks[] = {{int8_1_2, 2}, {int8_2_1, 1}};
#else
BLOCK(1, 1) BLOCK(2, 1)
static const struct block blocks[] = {{block_1_1, 1}, {block_2_1, 1}};
INT8_BLOCK(1, 1) INT8_BLOCK(2, 1)
static const struct block int8_blocks[] = {{int8_1_1, 1}, {int8_2_1, 1}};
#endif

INLINE int64_t max_rows(int kind)
{
    size_t count = kind == KIND_INT8 ? sizeof int8_blocks / sizeof *int8_blocks : sizeof blocks / sizeof *blocks;
    return (int64_t)count;
}

/* ---- the loop over blocks ---- */

static int64_t min_int(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static const struct block *block_of(int kind, int64_t rows)
{
    return kind == KIND_INT8 ? &int8_blocks[rows - 1] : &blocks[rows - 1];
}

static void multiply_rows(const struct linear_job *job, int64_t row, int64_t rows, int64_t panel, int64_t end)
{
    const struct block *block = block_of(job->weight->kind, rows);
    for (; panel < end; panel += block->panels)
        block->multiply(job, row, panel);
}

/* A few panels stay in the cache while all rows pass over them. */
static void multiply_panels(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t panel = item * job->panels_per_item, most = max_rows(job->weight->kind);
    int64_t end = min_int(panel + job->panels_per_item, count_panels(job->weight->num_outputs));
    int64_t num_blocks = (job->num_rows + most - 1) / most;
    int64_t widest = block_of(job->weight->kind, job->num_rows / num_blocks)->panels; /* the lowest block's: the widest */
    int64_t step = num_blocks == 1 ? end - panel : widest;
    for (; panel < end; panel += step)
        for (int64_t b = 0, row = 0; b < num_blocks; b++) {
            int64_t rows = (job->num_rows - row + num_blocks - b - 1) / (num_blocks - b); /* about equally high */
            multiply_rows(job, row, rows, panel, min_int(panel + step, end));
            row += rows;
        }
}

static void prepare_int8_rows(struct linear_job *job)
{
    size_t numbers = (size_t)(job->num_rows * padded_inputs(KIND_INT8, job->weight->num_inputs));
    char *memory = scratch(SCRATCH_ROWS, numbers + numbers / GROUP * 8);
    job->scales = (float *)memory;
    job->starts = (int32_t *)(memory + numbers / GROUP * 4);
    job->whole = (int8_t *)(memory + numbers / GROUP * 8);
    parallel(row_items(job->num_rows), quantize_rows, job);
}

static void prepare_rows(struct linear_job *job)
{
    if (job->weight->kind == KIND_INT8) {
        prepare_int8_rows(job);
    } else if (job->x.dtype == F32) {
        job->wide = job->x.data;
        job->wide_stride = job->x.stride;
    } else {
        job->wide_stride = job->weight->num_inputs;
        job->wide = scratch(SCRATCH_ROWS, (size_t)(job->num_rows * job->wide_stride) * sizeof(float));
        parallel(row_items(job->num_rows), widen_rows, job);
    }
}

/* Enough items for the threads to share, few enough that handing them out costs nothing. */
static int64_t panels_per_item(int64_t num_panels, int64_t num_rows)
{
    int64_t items = num_threads() == 1 ? 1 : num_threads() * (num_rows > 16 ? 8 : 4);
    return round_up((num_panels + items - 1) / items, PANEL_GROUP);
}

static void linear_in_vectors(const struct rows *x, int64_t num_rows, const struct weight *weight, const struct rows *out)
{
    int64_t num_panels = count_panels(weight->num_outputs);
    int64_t rows_per_pass = min_int(num_rows, 1 + (1 << 20) / (4 * weight->num_inputs)); /* activations stay in L2 */
    for (int64_t row = 0; row < num_rows; row += rows_per_pass) {
        struct linear_job job = {.weight = weight, .x = *x, .out = *out};
        job.x.data = row_of(x, row);
        job.out.data = row_of(out, row);
        job.num_rows = min_int(rows_per_pass, num_rows - row);
        job.panels_per_item = panels_per_item(num_panels, job.num_rows);
        prepare_rows(&job);
        parallel((num_panels + job.panels_per_item - 1) / job.panels_per_item, multiply_panels, &job);
    }
}
