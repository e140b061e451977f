/* y = x W^T + b.
 *
 * Every output element is one chain of multiply-adds over the inputs in order, whatever the number of rows, the blocking
 * and the threads: a row's result is the same bits in every batch. (Whole-number sums of int8 are exact anyway.) The
 * weights are read once for all rows of a block; with one row this runs at the speed of the memory. */

#define VPP (PANEL / W) /* vectors per panel */

#if defined(ISA_AVX512)
enum { MAX_ROWS = 12, WIDE_PANELS = 4, WIDE_ROWS = 3 };
#define NARROW_PANELS 2
#elif defined(ISA_AVX2)
enum { MAX_ROWS = 4, WIDE_PANELS = 2, WIDE_ROWS = 1 };
#define NARROW_PANELS 1
#else
enum { MAX_ROWS = 2, WIDE_PANELS = 1, WIDE_ROWS = 1 };
#define NARROW_PANELS 1
#endif

INLINE int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

INLINE int64_t padded_inputs(int kind, int64_t num_inputs)
{
    return kind == KIND_INT8 ? round_up(num_inputs, 64) : kind == KIND_BF16 ? round_up(num_inputs, 32) : num_inputs;
}

/* Whole groups of panels, so that blocks need no narrow cases: the surplus is zero and never stored. */
INLINE int64_t count_panels(int64_t num_outputs)
{
    return round_up(num_outputs, PANEL * PANEL_GROUP) / PANEL;
}

INLINE size_t panel_bytes(int kind, int64_t num_inputs)
{
    size_t each = kind == KIND_INT8 ? 1 : kind == KIND_F32 ? 4 : 2;
    return (size_t)padded_inputs(kind, num_inputs) * PANEL * each;
}

/* ---- packing ---- */

struct pack_job {
    const void *weight;
    enum dtype dtype;
    int64_t num_outputs, num_inputs;
    int kind;
    void *data;
    float *scales;
    int32_t *sums;
};

INLINE float scalar_at(const void *p, size_t i, enum dtype dtype)
{
    float lanes[W];
    vstore(lanes, vload_part(at(p, i, dtype), 1, dtype));
    return lanes[0];
}

static void pack_int8_row(const struct pack_job *job, int64_t output, int8_t *panel, int lane)
{
    const void *row = at(job->weight, (size_t)(output * job->num_inputs), job->dtype);
    long n = (long)job->num_inputs;
    vf highest = vset(0);
    for (long i = 0; i < n; i += W)
        highest = vmax(highest, vabs(vload_at(row, i, n, job->dtype)));
    float scale = vhighest(highest) / 127.0f;
    vf inverse = vset(scale > 0 ? 1.0f / scale : 0.0f);
    int32_t sum = 0;
    for (long i = 0; i < n; i += W) {
        int8_t whole[W];
        vstore_int8(whole, vmul(vload_at(row, i, n, job->dtype), inverse));
        for (long j = i; j < i + W && j < n; j++) {
            panel[j / 4 * PANEL * 4 + lane * 4 + j % 4] = whole[j - i];
            sum += whole[j - i];
        }
    }
    job->scales[output] = scale;
    job->sums[output] = sum;
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
    for (int lane = 0; lane < PANEL; lane++) {
        int64_t output = index * PANEL + lane;
        if (output < job->num_outputs && job->kind == KIND_INT8)
            pack_int8_row(job, output, (int8_t *)panel, lane);
        else if (output < job->num_outputs)
            pack_float_row(job, output, panel, lane);
        else if (job->kind == KIND_INT8)
            job->scales[output] = 0, job->sums[output] = 0;
    }
}

static void pack(const void *weight, int dtype, int64_t num_outputs, int64_t num_inputs, int kind, void *data,
                 float *scales, int32_t *sums)
{
    struct pack_job job = {weight, (enum dtype)dtype, num_outputs, num_inputs, kind, data, scales, sums};
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
    float *row_scales;   /* int8: [num_rows] */
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

#if defined(ISA_AVX512) && !defined(ISA_AMX)
enum { OFFSET = 128 }; /* vpdpbusd multiplies unsigned by signed */
#else
enum { OFFSET = 0 };
#endif

static void quantize_row(const struct linear_job *job, int64_t row)
{
    long n = (long)job->weight->num_inputs, padded = (long)padded_inputs(KIND_INT8, n);
    int8_t *to = job->whole + row * padded;
    vf highest = vset(0), spoilt = vset(0); /* spoilt: NaN if a number is not finite, which a maximum may lose */
    for (long i = 0; i < n; i += W) {
        vf x = load_row(&job->x, row, i, n);
        highest = vmax(highest, vabs(x));
        spoilt = vfma(x, vset(0), spoilt);
    }
    float most = vhighest(highest) + vsum(spoilt);
    vf inverse = vset(most > 0 ? 127.0f / most : 0.0f);
    memset(to, 0, (size_t)padded);
    for (long i = 0; i < n; i += W) { /* padded is a multiple of W: no store passes the row's end */
        int8_t whole[W];
        vstore_int8(whole, vmul(load_row(&job->x, row, i, n), inverse));
        memcpy(to + i, whole, W);
    }
    for (long i = 0; OFFSET != 0 && i < padded; i++)
        to[i] = (int8_t)(to[i] ^ OFFSET);
    job->row_scales[row] = most / 127.0f;
}

static void quantize_rows(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        quantize_row(job, row);
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
INLINE wholes no_wholes(void) { return _mm512_setzero_si512(); }
INLINE wholes dot4(wholes sums, const int8_t *x, const int8_t *w)
{
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
}
INLINE vf whole_sums(wholes sums, const int32_t *weight_sums)
{
    __m512i surplus = _mm512_slli_epi32(_mm512_loadu_si512(weight_sums), 7); /* of the offset 128 */
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, surplus));
}
#elif defined(ISA_AVX2)
typedef __m256i wholes;
INLINE wholes no_wholes(void) { return _mm256_setzero_si256(); }
/* |x| times w with the sign of x: pairs stay within 2 * 127 * 127, so that nothing saturates. */
INLINE wholes dot4(wholes sums, const int8_t *x, const int8_t *w)
{
    int32_t four;
    memcpy(&four, x, 4);
    __m256i spread = _mm256_set1_epi32(four), weights = _mm256_loadu_si256((const __m256i *)w);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(spread), _mm256_sign_epi8(weights, spread));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vf whole_sums(wholes sums, const int32_t *weight_sums)
{
    (void)weight_sums;
    return _mm256_cvtepi32_ps(sums);
}
#else
typedef vi wholes;
INLINE wholes no_wholes(void) { return (wholes){0, 0, 0, 0}; }
INLINE wholes dot4(wholes sums, const int8_t *x, const int8_t *w)
{
    for (int i = 0; i < W; i++)
        sums[i] += x[0] * w[4 * i] + x[1] * w[4 * i + 1] + x[2] * w[4 * i + 2] + x[3] * w[4 * i + 3];
    return sums;
}
INLINE vf whole_sums(wholes sums, const int32_t *weight_sums)
{
    (void)weight_sums;
    return __builtin_convertvector(sums, vf);
}
#endif

INLINE void multiply_int8(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels)
{
    const struct weight *weight = job->weight;
    const int64_t padded = padded_inputs(KIND_INT8, weight->num_inputs);
    const size_t bytes = (size_t)padded * PANEL;
    const int8_t *w = (const int8_t *)weight->data + (size_t)panel * bytes, *x = job->whole + row * padded;
    wholes sums[12][4 * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = no_wholes();
    for (int64_t four = 0; four < padded / 4; four++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][c] = dot4(sums[r][c], x + r * padded + 4 * four,
                                  w + (size_t)(c / VPP) * bytes + (four * PANEL + c % VPP * W) * 4);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++) {
            int64_t output = panel * PANEL + c * W;
            vf value = vmul(whole_sums(sums[r][c], weight->sums + output), vload(weight->scales + output));
            store_outputs(job, row + r, output, vmul(value, vset(job->row_scales[row + r])));
        }
}

INLINE void multiply_kind(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels)
{
    switch (job->weight->kind) {
    case KIND_F32:
        multiply(job, row, panel, rows, panels, KIND_F32);
        break;
    case KIND_BF16:
        multiply(job, row, panel, rows, panels, KIND_BF16);
        break;
    case KIND_F16:
        multiply(job, row, panel, rows, panels, KIND_F16);
        break;
    default:
        multiply_int8(job, row, panel, rows, panels);
    }
}

#define BLOCK(rows, panels)                                                                                  \
    static __attribute__((noinline)) void block_##rows##_##panels(const struct linear_job *job, int64_t row, \
                                                                  int64_t panel)                             \
    {                                                                                                        \
        multiply_kind(job, row, panel, rows, panels);                                                        \
    }
typedef void block(const struct linear_job *, int64_t row, int64_t panel);

#if defined(ISA_AVX512)
BLOCK(1, 4) BLOCK(2, 4) BLOCK(3, 4)
BLOCK(4, 2) BLOCK(5, 2) BLOCK(6, 2) BLOCK(7, 2) BLOCK(8, 2) BLOCK(9, 2) BLOCK(10, 2) BLOCK(11, 2) BLOCK(12, 2)
static block *const blocks[] = {block_1_4, block_2_4, block_3_4, block_4_2, block_5_2, block_6_2, block_7_2, block_8_2,
                                block_9_2, block_10_2, block_11_2, block_12_2};
#elif defined(ISA_AVX2)
BLOCK(1, 2) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1)
static block *const blocks[] = {block_1_2, block_2_1, block_3_1, block_4_1};
#else
BLOCK(1, 1) BLOCK(2, 1)
static block *const blocks[] = {block_1_1, block_2_1};
#endif

/* ---- the loop over blocks ---- */

static int64_t min_int(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void multiply_rows(const struct linear_job *job, int64_t row, int rows, int64_t panel, int64_t end)
{
    for (; panel < end; panel += rows <= WIDE_ROWS ? WIDE_PANELS : NARROW_PANELS)
        blocks[rows - 1](job, row, panel);
}

/* A few panels stay in the cache while all rows pass over them. */
static void multiply_panels(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t num_panels = count_panels(job->weight->num_outputs);
    int64_t panel = item * job->panels_per_item, end = min_int(panel + job->panels_per_item, num_panels);
    int64_t step = job->num_rows <= MAX_ROWS ? end - panel : NARROW_PANELS;
    int64_t num_blocks = (job->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (; panel < end; panel += step)
        for (int64_t b = 0, row = 0; b < num_blocks; b++) {
            int64_t rows = (job->num_rows - row + num_blocks - b - 1) / (num_blocks - b); /* about equally high */
            multiply_rows(job, row, (int)rows, panel, min_int(panel + step, end));
            row += rows;
        }
}

static void prepare_rows(struct linear_job *job)
{
    const struct weight *w = job->weight;
    if (w->kind == KIND_INT8) {
        job->whole = scratch(SCRATCH_ROWS, (size_t)(job->num_rows * padded_inputs(KIND_INT8, w->num_inputs)));
        job->row_scales = scratch(SCRATCH_SCALES, (size_t)job->num_rows * sizeof(float));
        parallel(row_items(job->num_rows), quantize_rows, job);
    } else if (job->x.dtype == F32) {
        job->wide = job->x.data;
        job->wide_stride = job->x.stride;
    } else {
        job->wide = scratch(SCRATCH_ROWS, (size_t)(job->num_rows * w->num_inputs) * sizeof(float));
        job->wide_stride = w->num_inputs;
        parallel(row_items(job->num_rows), widen_rows, job);
    }
}

/* Enough items for the threads to share, few enough that handing them out costs nothing. */
static int64_t panels_per_item(int64_t num_panels, int64_t num_rows)
{
    int64_t items = num_threads() == 1 ? 1 : num_threads() * (num_rows > MAX_ROWS ? 8 : 4);
    return round_up((num_panels + items - 1) / items, WIDE_PANELS);
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
