/* y = x W^T + b.
 *
 * Every output element is one chain of multiply-adds over the inputs in order (in bf16, where the processor multiplies it,
 * over pairs of inputs; quantized: over groups of inputs, whose sums of whole numbers are exact), whatever the number of
 * rows, the blocking and the threads: a row's result is the same bits in every batch. Weights are read once for all rows
 * of a block; with one row this runs at the memory's speed. */

#define VPP (PANEL / W) /* vectors per panel */

#if defined(ISA_AMX)
enum { USES_TILES = 1 }; /* for bf16, int8 and int4 */
#else
enum { USES_TILES = 0 };
#endif
#if defined(ISA_BF16) && !defined(ISA_AMX)
enum { USES_DOTS = 1 }; /* for bf16 */
#else
enum { USES_DOTS = 0 };
#endif

struct linear_job {
    const struct weight *weight;
    enum then then;
    struct rows x;   /* what the caller gave, beginning at the first row of the pass */
    struct rows out;
    int64_t num_rows;
    struct rows taken;   /* [num_rows, padded inputs], of the type that is multiplied */
    struct quantized_group *groups; /* four bits: [num_rows, padded inputs / GROUP] */
    int8_t *wholes;                 /* eight bits: [groups, num_rows, INT8_GROUP] */
    struct rounded *rounded;        /* eight bits: [groups, num_rows] */
    int64_t panels_per_item;
    int64_t apart; /* panels from gates to what they let through: a block takes both */
};

INLINE vf with_bias(const struct linear_job *job, int64_t output, vf value)
{
    return job->weight->bias == NULL ? value : vadd(value, vload(job->weight->bias + output));
}

/* `dtype`: that of the results */
INLINE void store_outputs(const struct linear_job *job, int64_t row, int64_t output, vf value, enum dtype dtype)
{
    const int64_t n = job->weight->num_outputs;
    void *to = row_as(&job->out, row, dtype);
    if (output >= n)
        return;
    value = with_bias(job, output, value);
    if (job->then == ADD)
        value = vadd(value, vload_at(to, output, n, dtype));
    vstore_at(to, output, n, value, dtype);
}

enum { MOST_BLOCK_ROWS = 12, MOST_QUANTIZED_ROWS = 12 };

/* From so many rows on a number that is loaded takes so long to multiply that the processor does not read ahead by itself:
 * the panels that are next are asked for meanwhile, into the cache behind the nearest one, which has no room for them. */
enum { MANY_DOT_ROWS = 2, MANY_QUANTIZED_ROWS = 6 };

INLINE void fetch_panel(const char *p)
{
    __builtin_prefetch(p, 0, 2);
}

/* Of gates without what they let through, which the other half of a block's panels is. */
INLINE int panels_of_outputs(const struct linear_job *job, const int panels)
{
    return job->then == GATE ? (panels + 1) / 2 : panels;
}

INLINE void locate_panels(const struct linear_job *job, int64_t panel, const int panels, size_t bytes,
                          const char *at[PANEL_GROUP])
{
    const int outputs = panels_of_outputs(job, panels);
    UNROLL for (int p = 0; p < panels; p++)
        at[p] = (const char *)job->weight->data + (size_t)(panel + (p < outputs ? p : job->apart + p - outputs)) * bytes;
}

/* Sums leave their registers for here, a row of them every RESULT_STRIDE, before anything is done with them: code for every
 * type of result behind the loop would make the compiler keep them in memory from the beginning. */
enum { RESULT_STRIDE = PANEL_GROUP * PANEL, MOST_RESULTS = MOST_BLOCK_ROWS * RESULT_STRIDE };

static __attribute__((noinline)) void store_results(const struct linear_job *shared, int64_t row, int64_t panel, int rows,
                                                    int panels, const float *results)
{
    const struct linear_job job = *shared; /* our own: stores do not change it */
    FOR_DTYPE(job.out.dtype, {
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < panels * PANEL; i += W)
                store_outputs(&job, row + r, panel * PANEL + i, vload(results + r * RESULT_STRIDE + i), dtype);
    });
}

/* Of gates, and of what they let through: the value that passes. */
INLINE vf gated(const struct linear_job *job, int64_t output, vf gate, vf passed)
{
    int64_t width = job->weight->num_outputs / 2;
    return vmul(silu(with_bias(job, output, gate)), with_bias(job, output + width, passed));
}

/* Of some panels of gates and, beside them, of what they let through. */
static __attribute__((noinline)) void store_gated(const struct linear_job *shared, int64_t row, int64_t panel, int rows,
                                                  int gates, const float *results)
{
    const struct linear_job job = *shared;
    const int64_t width = job.weight->num_outputs / 2;
    FOR_DTYPE(job.out.dtype, {
        for (int r = 0; r < rows; r++, results += RESULT_STRIDE)
            for (int i = 0; i < gates * PANEL; i += W) {
                int64_t output = panel * PANEL + i;
                vf passed = gated(&job, output, vload(results + i), vload(results + gates * PANEL + i));
                vstore_at(row_as(&job.out, row + r, dtype), output, width, passed, dtype);
            }
    });
}

#include "linear_int4.c"

#include "linear_int8.c"

static void take_rows(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    long n = (long)job->weight->num_inputs, padded = (long)job->taken.stride;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        for (long i = 0; i < padded; i += W)
            store_row(&job->taken, row, i, padded, i < n ? load_row(&job->x, row, i, n) : vset(0));
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
                     const int kind, float *to)
{
    const int64_t inputs = job->weight->num_inputs, stride = job->taken.stride;
    const char *at[PANEL_GROUP];
    locate_panels(job, panel, panels, panel_bytes(kind, inputs), at);
    const float *x = row_of(&job->taken, row);
    vf sums[MOST_BLOCK_ROWS][PANEL_GROUP * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = vset(0);
    for (int64_t pair = 0; pair < inputs / 2; pair++) {
        vf first[4 * VPP], second[4 * VPP];
        UNROLL for (int c = 0; c < panels * VPP; c++)
            load_weights(at[c / VPP], kind, pair, c % VPP, &first[c], &second[c]);
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
                                  load_last_weights(at[c / VPP], kind, inputs - 1, c % VPP), sums[r][c]);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            vstore(to + r * RESULT_STRIDE + c * W, sums[r][c]);
}

#if defined(ISA_BF16)
/* A pair of bf16 in every lane. */
INLINE __m512bh all_pairs(const uint16_t *pair)
{
    int32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

/* Inputs two by two: the processor adds both products at once. */
INLINE void multiply_dots(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels,
                          float *to)
{
    const int64_t stride = job->taken.stride, padded = padded_inputs(KIND_BF16, job->weight->num_inputs);
    const size_t bytes = panel_bytes(KIND_BF16, padded), ahead = (size_t)panels_of_outputs(job, panels) * bytes;
    const bool fetches = rows >= MANY_DOT_ROWS && row == 0; /* for the rows behind it, too */
    const char *at[PANEL_GROUP];
    locate_panels(job, panel, panels, bytes, at);
    const uint16_t *x = row_of(&job->taken, row);
    vf sums[MOST_BLOCK_ROWS][PANEL_GROUP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels; c++)
            sums[r][c] = vset(0);
    for (int64_t pair = 0; pair < padded / 2; pair++) {
        __m512bh weights[PANEL_GROUP];
        UNROLL for (int c = 0; c < panels; c++)
            weights[c] = (__m512bh)_mm512_loadu_si512(at[c] + pair * 64);
        if (fetches)
            UNROLL for (int c = 0; c < panels; c++)
                fetch_panel(at[c] + pair * 64 + ahead);
        UNROLL for (int r = 0; r < rows; r++) {
            __m512bh both = all_pairs(x + r * stride + 2 * pair);
            UNROLL for (int c = 0; c < panels; c++)
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], weights[c], both);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels; c++)
            vstore(to + r * RESULT_STRIDE + c * W, sums[r][c]);
}
#define MULTIPLY_BF16(job, row, panel, rows, panels, to) multiply_dots(job, row, panel, rows, panels, to)
#else
#define MULTIPLY_BF16(job, row, panel, rows, panels, to) multiply(job, row, panel, rows, panels, KIND_BF16, to)
#endif

#define BLOCK(rows, panels)                                                                                  \
    static __attribute__((noinline)) void block_##rows##_##panels(const struct linear_job *job, int64_t row, \
                                                                  int64_t panel, float *to)                  \
    {                                                                                                        \
        if (job->weight->kind == KIND_F32)                                                                   \
            multiply(job, row, panel, rows, panels, KIND_F32, to);                                               \
        else if (!USES_TILES && job->weight->kind == KIND_BF16)                                              \
            MULTIPLY_BF16(job, row, panel, rows, panels, to);                                                    \
        else                                                                                                 \
            multiply(job, row, panel, rows, panels, KIND_F16, to);                                               \
    }
#define QUANTIZED_BLOCK(rows, panels)                                                                             \
    static __attribute__((noinline)) void quantized_##rows##_##panels(const struct linear_job *job, int64_t row,  \
                                                                      int64_t panel, float *to)                  \
    {                                                                                                        \
        if (!USES_TILES && job->weight->kind == KIND_INT8)                                                   \
            multiply_int8(job, row, panel, rows, panels, to);                                                    \
        else if (!USES_TILES)                                                                                \
            multiply_int4(job, row, panel, rows, panels, to);                                                    \
    }

/* By the number of rows, beginning with one; `panels` is how many a block takes. Few rows wait for memory, which delivers
 * one panel after the other soonest; of many, every number that is loaded should serve two panels, unless registers are
 * better spent on more rows: quantized products need two for a sum. */
struct block {
    void (*multiply)(const struct linear_job *, int64_t row, int64_t panel, float *to);
    int panels;
};

struct blocks {
    const struct block *of_rows; /* [most_rows] */
    int64_t most_rows;
};

#if defined(ISA_AVX512)
BLOCK(1, 1) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1) BLOCK(5, 1) BLOCK(6, 1) BLOCK(7, 2) BLOCK(8, 2) BLOCK(9, 2)
BLOCK(10, 2) BLOCK(11, 2) BLOCK(12, 2)
static const struct block blocks[] = {{block_1_1, 1}, {block_2_1, 1}, {block_3_1, 1}, {block_4_1, 1}, {block_5_1, 1},
                                      {block_6_1, 1}, {block_7_2, 2}, {block_8_2, 2}, {block_9_2, 2}, {block_10_2, 2},
                                      {block_11_2, 2}, {block_12_2, 2}};
QUANTIZED_BLOCK(1, 1) QUANTIZED_BLOCK(2, 1) QUANTIZED_BLOCK(3, 1) QUANTIZED_BLOCK(4, 1) QUANTIZED_BLOCK(5, 1)
QUANTIZED_BLOCK(6, 1) QUANTIZED_BLOCK(7, 1) QUANTIZED_BLOCK(8, 1) QUANTIZED_BLOCK(9, 1) QUANTIZED_BLOCK(10, 1)
QUANTIZED_BLOCK(11, 1) QUANTIZED_BLOCK(12, 1)
static const struct block quantized_blocks[] = {{quantized_1_1, 1}, {quantized_2_1, 1}, {quantized_3_1, 1},
                                                {quantized_4_1, 1}, {quantized_5_1, 1}, {quantized_6_1, 1},
                                                {quantized_7_1, 1}, {quantized_8_1, 1}, {quantized_9_1, 1},
                                                {quantized_10_1, 1}, {quantized_11_1, 1}, {quantized_12_1, 1}};
#elif defined(ISA_AVX2)
BLOCK(1, 2) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1)
static const struct block blocks[] = {{block_1_2, 2}, {block_2_1, 1}, {block_3_1, 1}, {block_4_1, 1}};
QUANTIZED_BLOCK(1, 2) QUANTIZED_BLOCK(2, 1)
static const struct block quantized_blocks[] = {{quantized_1_2, 2}, {quantized_2_1, 1}};
#else
BLOCK(1, 1) BLOCK(2, 1)
static const struct block blocks[] = {{block_1_1, 1}, {block_2_1, 1}};
QUANTIZED_BLOCK(1, 1) QUANTIZED_BLOCK(2, 1)
static const struct block quantized_blocks[] = {{quantized_1_1, 1}, {quantized_2_1, 1}};
#endif

#if defined(ISA_BF16) && !defined(ISA_AMX)
/* More rows than one of the blocks above has: with four panels each number of a row serves four times, and six rows need no
 * more addresses than there are registers for. They are shared out four to six at a time. */
#define DOT_BLOCK(rows, panels)                                                                              \
    static __attribute__((noinline)) void dots_##rows##_##panels(const struct linear_job *job, int64_t row,  \
                                                                 int64_t panel, float *to)                   \
    {                                                                                                        \
        multiply_dots(job, row, panel, rows, panels, to);                                                    \
    }
DOT_BLOCK(4, 4) DOT_BLOCK(5, 4) DOT_BLOCK(6, 4)
static const struct block dot_blocks[] = {{NULL, 0}, {NULL, 0}, {NULL, 0}, {dots_4_4, 4}, {dots_5_4, 4}, {dots_6_4, 4}};
#endif

static struct blocks blocks_for(int kind, int64_t num_rows)
{
#if defined(ISA_BF16) && !defined(ISA_AMX)
    if (kind == KIND_BF16 && num_rows > MOST_BLOCK_ROWS)
        return (struct blocks){dot_blocks, sizeof dot_blocks / sizeof *dot_blocks};
#endif
    (void)num_rows;
    return is_quantized(kind) ? (struct blocks){quantized_blocks, sizeof quantized_blocks / sizeof *quantized_blocks}
                              : (struct blocks){blocks, sizeof blocks / sizeof *blocks};
}

/* ---- the loop over blocks ---- */

/* Of gates those of the first half alone are counted. */
static int64_t panels_to_share(const struct linear_job *job)
{
    return job->then == GATE ? job->weight->num_outputs / 2 / PANEL : count_panels(job->weight->num_outputs);
}

/* Results go to lines of many rows, more than the caches near by hold: they are asked for before they are computed. */
INLINE void fetch_results(const struct linear_job *job, int64_t row, int64_t rows, int64_t panel, int panels)
{
    const int64_t element = (int64_t)dtype_bytes((enum dtype)job->out.dtype), stride = job->out.stride * element;
    const char *first = (const char *)row_of(&job->out, row) + panel * PANEL * element;
    for (const char *line = first; line < first + panels * PANEL * element; line += 64)
        for (int64_t r = 0; r < rows; r++)
            __builtin_prefetch(line + r * stride, 1);
}

static void multiply_rows(const struct linear_job *job, const struct block *block, int64_t row, int64_t rows, int64_t panel,
                          int64_t end)
{
    const int outputs = panels_of_outputs(job, block->panels);
    float results[MOST_RESULTS] __attribute__((aligned(64)));
    for (; panel < end; panel += outputs) {
        fetch_results(job, row, rows, panel, outputs);
        block->multiply(job, row, panel, results);
        if (job->then == GATE && block->panels == 1)
            block->multiply(job, row, panel + job->apart, results + PANEL);
        if (job->then == GATE)
            store_gated(job, row, panel, (int)rows, outputs, results);
        else
            store_results(job, row, panel, (int)rows, outputs, results);
    }
}

/* A few panels stay in the cache while all rows pass over them. */
static void multiply_panels(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t panel = item * job->panels_per_item, end = min_int(panel + job->panels_per_item, panels_to_share(job));
    struct blocks blocks = blocks_for(job->weight->kind, job->num_rows);
    int64_t num_blocks = (job->num_rows + blocks.most_rows - 1) / blocks.most_rows;
    const struct block *lowest = &blocks.of_rows[job->num_rows / num_blocks - 1];
    const struct block *highest = &blocks.of_rows[(job->num_rows + num_blocks - 1) / num_blocks - 1];
    int wider = lowest->panels > highest->panels ? lowest->panels : highest->panels; /* a multiple of the other one */
    int64_t step = num_blocks == 1 ? end - panel : panels_of_outputs(job, wider);
    for (; panel < end; panel += step)
        for (int64_t b = 0, row = 0; b < num_blocks; b++) {
            int64_t rows = (job->num_rows - row + num_blocks - b - 1) / (num_blocks - b); /* about equally high */
            multiply_rows(job, &blocks.of_rows[rows - 1], row, rows, panel, min_int(panel + step, end));
            row += rows;
        }
}

static void prepare_rows(struct linear_job *job)
{
    int kind = job->weight->kind;
    if (kind == KIND_INT8) {
        prepare_wholes(job);
        return;
    }
    if (kind == KIND_INT4) {
        prepare_groups(job);
        return;
    }
    enum dtype dtype = USES_DOTS && kind == KIND_BF16 ? BF16 : F32;
    int64_t n = job->weight->num_inputs, padded = dtype == BF16 ? padded_inputs(kind, n) : n;
    if (job->x.dtype == (int32_t)dtype && n == padded) {
        job->taken = job->x;
    } else {
        size_t bytes = (size_t)(job->num_rows * padded) * dtype_bytes(dtype);
        job->taken = (struct rows){scratch(SCRATCH_ROWS, bytes), padded, dtype};
        parallel(row_items(job->num_rows), take_rows, job);
    }
}

/* Enough items for the threads to share, few enough that handing them out costs nothing. */
static int64_t panels_per_item(int64_t count, int64_t num_rows)
{
    int64_t items = num_threads() == 1 ? 1 : num_threads() * (num_rows > 16 ? 8 : 4);
    return round_up((count + items - 1) / items, PANEL_GROUP);
}

static void linear_in_vectors(const struct rows *x, int64_t num_rows, const struct weight *weight, enum then then,
                              const struct rows *out)
{
    int64_t rows_per_pass = min_int(num_rows, 1 + (1 << 20) / (4 * weight->num_inputs)); /* activations stay in L2 */
    for (int64_t row = 0; row < num_rows; row += rows_per_pass) {
        struct linear_job job = {.weight = weight, .then = then, .x = *x, .out = *out};
        job.x.data = row_of(x, row);
        job.out.data = row_of(out, row);
        job.num_rows = min_int(rows_per_pass, num_rows - row);
        job.panels_per_item = panels_per_item(panels_to_share(&job), job.num_rows);
        job.apart = panels_to_share(&job);
        prepare_rows(&job);
        parallel((panels_to_share(&job) + job.panels_per_item - 1) / job.panels_per_item, multiply_panels, &job);
    }
}
