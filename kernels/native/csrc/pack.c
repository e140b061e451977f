/* How weights are laid out for the kernels; see baton.h. */

INLINE int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

INLINE int is_quantized(int kind)
{
    return kind == KIND_INT8 || kind == KIND_INT4;
}

INLINE size_t span_bytes(int kind)
{
    return kind == KIND_INT8 ? INT8_SPAN_BYTES : INT4_SPAN_BYTES;
}

INLINE int64_t padded_inputs(int kind, int64_t num_inputs)
{
    if (is_quantized(kind))
        return round_up(num_inputs, SPAN);
    return kind == KIND_BF16 ? round_up(num_inputs, 32) : num_inputs;
}

/* Whole groups of panels, so that blocks need no narrow cases: the surplus is zero and never stored. */
INLINE int64_t count_panels(int64_t num_outputs)
{
    return round_up(num_outputs, PANEL * PANEL_GROUP) / PANEL;
}

INLINE size_t panel_bytes(int kind, int64_t num_inputs)
{
    size_t padded = (size_t)padded_inputs(kind, num_inputs);
    if (is_quantized(kind))
        return padded / SPAN * span_bytes(kind);
    return padded * PANEL * (kind == KIND_F32 ? 4 : 2);
}

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

/* The same of numbers of four bits, counted in half bytes. */
INLINE int nibble_of(int k, int lane)
{
#if defined(ISA_AMX)
    return (k / 8 * PANEL * 2 + lane * 2 + k % 2) * 4 + k / 2 % 4; /* the parts of a word go to neighbouring rows */
#else
    return (k % 16 / 4 * PANEL * 4 + lane * 4 + k % 4) * 2 + k / 16;
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

INLINE uint16_t to_half(float x)
{
    uint16_t halves[W];
    vstore_f16(halves, vset(x));
    return halves[0];
}

INLINE float from_half(uint16_t half)
{
    uint16_t halves[W] = {half};
    float wide[W];
    vstore(wide, vload_f16(halves));
    return wide[0];
}

/* One output's inputs, at most GROUP of them; what lies beyond the row counts as zero. */
struct group {
    float x[GROUP], lowest, highest;
};

static struct group load_group(const struct pack_job *job, const void *row, int64_t start)
{
    struct group g = {.lowest = scalar_at(row, (size_t)start, job->dtype)};
    g.highest = g.lowest;
    for (int64_t i = start; i < start + GROUP && i < job->num_inputs; i++) {
        g.x[i - start] = scalar_at(row, (size_t)i, job->dtype);
        g.lowest = fminf(g.lowest, g.x[i - start]);
        g.highest = fmaxf(g.highest, g.x[i - start]);
    }
    return g;
}

/* The largest magnitude becomes 127, or a little less when half precision rounds the scale up. */
static void pack_int8_group(const struct group *g, int second, uint8_t *span, int lane)
{
    float most = fmaxf(g->highest, -g->lowest);
    uint16_t half = to_half(most / 127.0f);
    half += from_half(half) * 127.0f < most; /* never beyond 127 */
    ((uint16_t *)span)[second * PANEL + lane] = half;
    float scale = from_half(half);
    uint8_t *whole = span + 2 * 2 * PANEL + second * GROUP * PANEL;
    for (int k = 0; k < GROUP; k++) {
        int value = scale > 0 ? (int)rintf(g->x[k] / scale) : 0;
        whole[place_of(k, lane)] = (uint8_t)(value ^ WEIGHT_OFFSET);
    }
}

/* The least becomes 0, the greatest 15: for what came as Q4_1, the numbers that it was made of. */
static void pack_int4_group(const struct group *g, int second, uint8_t *span, int lane)
{
    uint16_t *halves = (uint16_t *)span + second * PANEL + lane;
    halves[0] = to_half((g->highest - g->lowest) / 15.0f * INT4_FACTOR);
    halves[2 * PANEL] = to_half(g->lowest * INT4_FACTOR);
    float scale = from_half(halves[0]) / INT4_FACTOR, least = from_half(halves[2 * PANEL]) / INT4_FACTOR;
    uint8_t *whole = span + 2 * 2 * 2 * PANEL + second * GROUP * PANEL / 2;
    for (int k = 0; k < GROUP; k++) {
        float value = scale > 0 ? rintf((g->x[k] - least) / scale) : 0;
        int place = nibble_of(k, lane), shift = place % 2 * 4;
        whole[place / 2] |= (uint8_t)((int)fminf(fmaxf(value, 0), 15) << shift);
    }
}

static void pack_quantized_panel(const struct pack_job *job, int64_t index, uint8_t *panel)
{
    int64_t padded = padded_inputs(job->kind, job->num_inputs);
    for (int64_t start = 0; job->kind == KIND_INT8 && start < padded; start += SPAN)
        memset(panel + (size_t)(start / SPAN) * INT8_SPAN_BYTES + 2 * 2 * PANEL, WEIGHT_OFFSET, SPAN * PANEL);
    for (int lane = 0; lane < PANEL && index * PANEL + lane < job->num_outputs; lane++) {
        const void *row = at(job->weight, (size_t)((index * PANEL + lane) * job->num_inputs), job->dtype);
        for (int64_t start = 0; start < job->num_inputs; start += GROUP) {
            struct group g = load_group(job, row, start);
            uint8_t *span = panel + (size_t)(start / SPAN) * span_bytes(job->kind);
            if (job->kind == KIND_INT8)
                pack_int8_group(&g, (int)(start % SPAN / GROUP), span, lane);
            else
                pack_int4_group(&g, (int)(start % SPAN / GROUP), span, lane);
        }
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
    if (is_quantized(job->kind)) {
        pack_quantized_panel(job, index, (uint8_t *)panel);
        return;
    }
    for (int lane = 0; lane < PANEL && index * PANEL + lane < job->num_outputs; lane++)
        pack_float_row(job, index * PANEL + lane, panel, lane);
}

static void pack(const void *weight, int dtype, int64_t num_outputs, int64_t num_inputs, int kind, void *data)
{
    struct pack_job job = {weight, (enum dtype)dtype, num_outputs, num_inputs, kind, data};
    parallel(count_panels(num_outputs), pack_panel, &job);
}
