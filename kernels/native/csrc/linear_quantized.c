/* Products with quantized weights in whole numbers: activations are quantized row by row, a scale for each group. */

/* GROUP activations of a row as whole numbers: x = scale * number. */
struct quantized_group {
    float scale;
    float sum;      /* of the activations, as rounded */
    int32_t offset; /* what WEIGHT_OFFSET adds to a product, to be taken away */
    int8_t whole[GROUP];
};

INLINE int64_t count_groups(const struct linear_job *job)
{
    return padded_inputs(job->weight->kind, job->weight->num_inputs) / GROUP;
}

/* A number that is not finite makes the group's scale NaN: whole numbers could not show it. */
INLINE void quantize_group(const struct linear_job *job, int64_t row, int64_t start, struct quantized_group *to)
{
    vf x[GROUP / W], highest = vset(0), spoilt = vset(0);
    long n = (long)job->weight->num_inputs;
    UNROLL for (int i = 0; i < GROUP / W; i++) {
        x[i] = start + i * W < n ? load_row(&job->x, row, start + i * W, n) : vset(0);
        highest = vmax(highest, vabs(x[i]));
        spoilt = vfma(x[i], vset(0), spoilt);
    }
    float most = vhighest(highest);
    vf inverse = vset(most > 0 ? 127.0f / most : 0.0f), sum = vset(0);
    UNROLL for (int i = 0; i < GROUP / W; i++) {
        vf whole = vround(vmul(x[i], inverse));
        vstore_int8(to->whole + i * W, whole);
        sum = vadd(sum, whole);
    }
    float whole_sum = vsum(sum);
    to->scale = (most + vsum(spoilt)) / 127.0f;
    to->sum = to->scale * whole_sum;
    to->offset = whole_sum == whole_sum ? -WEIGHT_OFFSET * (int32_t)whole_sum : 0;
}

static void quantize_rows(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM, groups = count_groups(job);
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        for (int64_t g = 0; g < groups; g++)
            quantize_group(job, row, g * GROUP, job->groups + row * groups + g);
}

#if defined(ISA_AVX512)
typedef __m512i wholes;
INLINE wholes all_wholes(int32_t x) { return _mm512_set1_epi32(x); }
INLINE wholes dot4(wholes sums, int32_t x, const int8_t *w)
{
    return _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(w), _mm512_set1_epi32(x));
}
typedef struct { wholes low, high; } nibbles;
/* The lower and the upper half bytes, each a byte below 16: no sign to care for. */
INLINE nibbles load_nibbles(const uint8_t *w)
{
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i both = _mm512_loadu_si512(w);
    return (nibbles){_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
}
INLINE wholes dot_nibbles(wholes sums, int32_t x_low, int32_t x_high, nibbles w)
{
    sums = _mm512_dpbusd_epi32(sums, w.low, _mm512_set1_epi32(x_low));
    return _mm512_dpbusd_epi32(sums, w.high, _mm512_set1_epi32(x_high));
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
typedef struct { wholes low, high; } nibbles;
INLINE nibbles load_nibbles(const uint8_t *w)
{
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i both = _mm256_loadu_si256((const __m256i *)w);
    return (nibbles){_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
INLINE wholes dot_nibbles(wholes sums, int32_t x_low, int32_t x_high, nibbles w)
{
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(w.low, _mm256_set1_epi32(x_low)),
                                     _mm256_maddubs_epi16(w.high, _mm256_set1_epi32(x_high)));
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
typedef struct { int8_t low[4 * W], high[4 * W]; } nibbles;
INLINE nibbles load_nibbles(const uint8_t *w)
{
    nibbles both;
    for (int i = 0; i < 4 * W; i++) {
        both.low[i] = w[i] & 15;
        both.high[i] = (int8_t)(w[i] >> 4);
    }
    return both;
}
INLINE wholes dot_nibbles(wholes sums, int32_t x_low, int32_t x_high, nibbles w)
{
    return dot4(dot4(sums, x_low, w.low), x_high, w.high);
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
    const int64_t groups = count_groups(job);
    const size_t bytes = panel_bytes(KIND_INT8, job->weight->num_inputs);
    const char *w = (const char *)job->weight->data + (size_t)panel * bytes;
    const struct quantized_group *x = job->groups + row * groups;
    vf sums[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = vset(0);
    for (int64_t g = 0; g < groups; g++) {
        const char *span = w + g / 2 * INT8_SPAN_BYTES;
        const int8_t *whole = (const int8_t *)span + 4 * PANEL + g % 2 * GROUP * PANEL;
        wholes dots[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < panels * VPP; c++)
                dots[r][c] = all_wholes(x[r * groups + g].offset);
        UNROLL for (int four = 0; four < GROUP / 4; four++)
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int c = 0; c < panels * VPP; c++)
                    dots[r][c] = dot4(dots[r][c], four_bytes(x[r * groups + g].whole + 4 * four),
                                      whole + (size_t)(c / VPP) * bytes + (four * PANEL + c % VPP * W) * 4);
        UNROLL for (int c = 0; c < panels * VPP; c++) {
            const uint16_t *halves = (const uint16_t *)(span + (size_t)(c / VPP) * bytes) + g % 2 * PANEL;
            vf scale = vload_f16(halves + c % VPP * W);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][c] = vfma(as_floats(dots[r][c]), vmul(scale, vset(x[r * groups + g].scale)), sums[r][c]);
        }
    }
    struct results results;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            vstore(&results.of[r][c * W], sums[r][c]);
    store_results(job, row, panel, rows, panels, &results);
}

/* With many rows a span of numbers of four bits takes so long that the processor does not read ahead by itself. */
INLINE void fetch_int4_spans(const char *span, const int rows)
{
    enum { SPANS = 4, MANY_ROWS = 6 };
    if (rows >= MANY_ROWS)
        UNROLL for (size_t line = 0; line < INT4_SPAN_BYTES; line += 64)
            __builtin_prefetch(span + SPANS * INT4_SPAN_BYTES + line);
}

/* y = sum over groups of (scale * sum of q x + least * sum of x), each sum of q x exact. */
INLINE void multiply_int4(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels)
{
    const int64_t groups = count_groups(job);
    const size_t bytes = panel_bytes(KIND_INT4, job->weight->num_inputs);
    const char *w = (const char *)job->weight->data + (size_t)panel * bytes;
    const struct quantized_group *x = job->groups + row * groups;
    vf sums[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = vset(0);
    for (int64_t g = 0; g < groups; g++) {
        const char *span = w + g / 2 * INT4_SPAN_BYTES;
        const uint8_t *whole = (const uint8_t *)span + 8 * PANEL + g % 2 * GROUP * PANEL / 2;
        if (g % 2 == 0)
            fetch_int4_spans(span, rows);
        wholes dots[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < panels * VPP; c++)
                dots[r][c] = all_wholes(0);
        UNROLL for (int four = 0; four < GROUP / 8; four++) {
            nibbles both[PANEL_GROUP * VPP];
            UNROLL for (int c = 0; c < panels * VPP; c++)
                both[c] = load_nibbles(whole + (size_t)(c / VPP) * bytes + (four * PANEL + c % VPP * W) * 4);
            UNROLL for (int r = 0; r < rows; r++) {
                const int8_t *group = x[r * groups + g].whole;
                int32_t low = four_bytes(group + 4 * four), high = four_bytes(group + 4 * four + GROUP / 2);
                UNROLL for (int c = 0; c < panels * VPP; c++)
                    dots[r][c] = dot_nibbles(dots[r][c], low, high, both[c]);
            }
        }
        UNROLL for (int c = 0; c < panels * VPP; c++) {
            const uint16_t *halves = (const uint16_t *)(span + (size_t)(c / VPP) * bytes) + g % 2 * PANEL + c % VPP * W;
            vf scale = vload_f16(halves), least = vload_f16(halves + 2 * PANEL);
            UNROLL for (int r = 0; r < rows; r++) {
                const struct quantized_group *group = x + r * groups + g;
                sums[r][c] = vfma(as_floats(dots[r][c]), vmul(scale, vset(group->scale)), sums[r][c]);
                sums[r][c] = vfma(least, vset(group->sum), sums[r][c]);
            }
        }
    }
    struct results results;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            vstore(&results.of[r][c * W], vmul(sums[r][c], vset(1.0f / INT4_FACTOR)));
    store_results(job, row, panel, rows, panels, &results);
}
