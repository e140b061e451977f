/* How weights are laid out for the kernels; see baton.h. */

INLINE int64_t min_int(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

INLINE int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

INLINE int is_quantized(int kind)
{
    return kind == KIND_INT8 || kind == KIND_INT4;
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

INLINE int64_t count_int8_groups(int64_t padded)
{
    return (padded + INT8_GROUP - 1) / INT8_GROUP;
}

INLINE size_t panel_bytes(int kind, int64_t num_inputs)
{
    size_t padded = (size_t)padded_inputs(kind, num_inputs);
    if (kind == KIND_INT8)
        return (size_t)count_int8_groups((int64_t)padded) * INT8_HEAD_BYTES + padded * PANEL;
    if (kind == KIND_INT4)
        return padded / SPAN * INT4_SPAN_BYTES;
    return padded * PANEL * (kind == KIND_F32 ? 4 : 2);
}

/* Where the whole number of input k of a group and of an output of the panel lies. */
INLINE int64_t place_of(int64_t k, int lane)
{
#if defined(ISA_AMX)
    return k / 4 * PANEL * 4 + lane * 4 + k % 2 * 2 + k / 2 % 2; /* bytes of a word go to neighbouring rows of a tile */
#else
    return k / 4 * PANEL * 4 + lane * 4 + k % 4;
#endif
}

/* Where the number of four bits of input k of a group and of an output of the panel lies, counted in half bytes. */
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
    enum dtype dtype; /* or one of enum block_format */
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

/* GROUP inputs of one output as whole numbers: x = scale * number + least. */
struct numbers {
    uint16_t scale, least; /* in half precision, times INT4_FACTOR */
    int8_t whole[GROUP];   /* from 0 to 15 */
};

/* What lies beyond the row counts as zero. */
struct group {
    vf x[GROUP / W];
    float lowest, highest;
};

static struct group load_group(const struct pack_job *job, const void *row, long start)
{
    struct group g;
    long n = (long)job->num_inputs;
    vf lowest = vset(INFINITY), highest = vset(-INFINITY);
    for (int i = 0; i < GROUP / W; i++) {
        g.x[i] = start + i * W < n ? vload_at(row, start + i * W, n, job->dtype) : vset(0);
        lowest = vmin(lowest, g.x[i]);
        highest = vmax(highest, g.x[i]);
    }
    g.lowest = -vhighest(vsub(vset(0), lowest));
    g.highest = vhighest(highest);
    return g;
}

/* The least becomes 0, the greatest 15: for what came as Q4_1, the numbers that it was made of. */
static void round_to_int4(const struct group *g, struct numbers *numbers)
{
    numbers->scale = to_half((g->highest - g->lowest) / 15.0f * INT4_FACTOR);
    numbers->least = to_half(g->lowest * INT4_FACTOR);
    float scale = from_half(numbers->scale) / INT4_FACTOR, least = from_half(numbers->least) / INT4_FACTOR;
    for (int i = 0; i < GROUP / W; i++) {
        vf x = scale > 0 ? vround(vdiv(vsub(g->x[i], vset(least)), vset(scale))) : vset(0);
        vstore_int8(numbers->whole + i * W, vmin(vmax(x, vset(0)), vset(15.0f)));
    }
}

INLINE int64_t block_bytes(int format)
{
    return format == BLOCK_Q8_0 ? 2 + GROUP : (format == BLOCK_Q4_1 ? 4 : 2) + GROUP / 2;
}

/* A block of a GGUF file: its scale, for Q4_1 its least value, then the numbers, the first half of them in the lower half
 * bytes. Those of Q4_0 mean eight less. */
static void read_int4_block(const uint8_t *block, int format, struct numbers *numbers)
{
    uint16_t halves[2];
    memcpy(halves, block, sizeof halves);
    float least = format == BLOCK_Q4_1 ? from_half(halves[1]) : -8.0f * from_half(halves[0]);
    numbers->scale = to_half(from_half(halves[0]) * INT4_FACTOR);
    numbers->least = to_half(least * INT4_FACTOR);
    const uint8_t *pairs = block + (format == BLOCK_Q4_1 ? 4 : 2);
    for (int i = 0; i < GROUP / 2; i++) {
        numbers->whole[i] = pairs[i] & 15;
        numbers->whole[i + GROUP / 2] = (int8_t)(pairs[i] >> 4);
    }
}

/* A whole output's weights. Of a file's blocks those of eight bits alone are packed as int8. */
static void read_row(const struct pack_job *job, int64_t output, float *values)
{
    long n = (long)job->num_inputs;
    const uint8_t *block = (const uint8_t *)job->weight + output * (n / GROUP) * block_bytes(BLOCK_Q8_0);
    for (long i = 0; i < n; i += W)
        if (job->dtype <= F16) {
            vstore_at(values, i, n, vload_at(at(job->weight, (size_t)(output * n), job->dtype), i, n, job->dtype), F32);
        } else {
            const uint8_t *of = block + i / GROUP * block_bytes(BLOCK_Q8_0);
            uint16_t half;
            memcpy(&half, of, sizeof half);
            vstore(values + i, vmul(vload_int8((const int8_t *)of + 2 + i % GROUP), vset(from_half(half))));
        }
}

static void put_int8(const int8_t *whole, int64_t count, uint8_t *to, int lane)
{
    for (int64_t k = 0; k < count; k++)
        to[place_of(k, lane)] = (uint8_t)(whole[k] ^ WEIGHT_OFFSET);
}

static void pack_int8_panel(const struct pack_job *job, int64_t index, char *panel)
{
    int64_t padded = padded_inputs(KIND_INT8, job->num_inputs);
    float *values = scratch(SCRATCH_ROW, (size_t)padded * sizeof *values);
    int8_t whole[INT8_GROUP];
    for (int lane = 0; lane < PANEL; lane++) {
        bool is_output = index * PANEL + lane < job->num_outputs;
        memset(values, 0, (size_t)padded * sizeof *values);
        if (is_output)
            read_row(job, index * PANEL + lane, values);
        turn(values, F32, job->num_inputs, values, padded);
        char *group = panel;
        for (int64_t start = 0; start < padded; start += INT8_GROUP, group += INT8_GROUP_BYTES) {
            int64_t count = min_int(INT8_GROUP, padded - start);
            ((float *)group)[lane] = round_group(values + start, count, whole).scale / turned_length(padded);
            put_int8(whole, count, (uint8_t *)group + INT8_HEAD_BYTES, lane);
        }
    }
}

static void put_int4(const struct numbers *numbers, int second, uint8_t *span, int lane)
{
    uint16_t *halves = (uint16_t *)span + second * PANEL + lane;
    halves[0] = numbers->scale;
    halves[2 * PANEL] = numbers->least;
    uint8_t *whole = span + 2 * 2 * 2 * PANEL + second * GROUP * PANEL / 2;
    for (int k = 0; k < GROUP; k++) {
        int place = nibble_of(k, lane);
        whole[place / 2] |= (uint8_t)(numbers->whole[k] << place % 2 * 4);
    }
}

static void read_group(const struct pack_job *job, int64_t output, int64_t start, struct numbers *numbers)
{
    if (job->dtype > F16) {
        int64_t block = output * (job->num_inputs / GROUP) + start / GROUP;
        read_int4_block((const uint8_t *)job->weight + block * block_bytes(job->dtype), job->dtype, numbers);
        return;
    }
    struct group g = load_group(job, at(job->weight, (size_t)(output * job->num_inputs), job->dtype), (long)start);
    round_to_int4(&g, numbers);
}

static void pack_int4_panel(const struct pack_job *job, int64_t index, char *panel)
{
    for (int lane = 0; lane < PANEL && index * PANEL + lane < job->num_outputs; lane++)
        for (int64_t start = 0; start < job->num_inputs; start += GROUP) {
            struct numbers numbers = {0};
            read_group(job, index * PANEL + lane, start, &numbers);
            put_int4(&numbers, (int)(start % SPAN / GROUP), (uint8_t *)panel + (size_t)(start / SPAN) * INT4_SPAN_BYTES, lane);
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
        pack_int8_panel(job, index, panel);
    if (job->kind == KIND_INT4)
        pack_int4_panel(job, index, panel);
    if (is_quantized(job->kind))
        return;
    for (int lane = 0; lane < PANEL && index * PANEL + lane < job->num_outputs; lane++)
        pack_float_row(job, index * PANEL + lane, panel, lane);
}

static void pack(const void *weight, int dtype, int64_t num_outputs, int64_t num_inputs, int kind, void *data)
{
    struct pack_job job = {weight, (enum dtype)dtype, num_outputs, num_inputs, kind, data};
    parallel(count_panels(num_outputs), pack_panel, &job);
}
