/* Products with weights of four bits in whole numbers: activations are quantized too, a scale for each group of inputs. */

/* GROUP activations of a row as whole numbers: x = scale * number. */
struct quantized_group {
    float scale;
    float sum;      /* of the activations, as rounded */
    int8_t whole[GROUP];
};

INLINE int64_t count_groups(const struct linear_job *job)
{
    return padded_inputs(KIND_INT4, job->weight->num_inputs) / GROUP;
}

INLINE void quantize_group(const struct linear_job *job, int64_t row, int64_t start, struct quantized_group *to)
{
    vf x[GROUP / W], highest = vset(0);
    long n = (long)job->weight->num_inputs;
    UNROLL for (int i = 0; i < GROUP / W; i++) {
        x[i] = start + i * W < n ? load_row(&job->x, row, start + i * W, n) : vset(0);
        highest = vmax_magnitude(highest, x[i]);
    }
    float most = vhighest_magnitude(highest);
    vf inverse = vset(steps_per_unit(most)), sum = vset(0);
    UNROLL for (int i = 0; i < GROUP / W; i++) {
        vf whole = vround(vmul(x[i], inverse));
        vstore_int8(to->whole + i * W, whole);
        sum = vadd(sum, whole);
    }
    to->scale = scale_of(most);
    to->sum = to->scale * vsum(sum);
}

static void quantize_groups(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM, groups = count_groups(job);
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        for (int64_t g = 0; g < groups; g++)
            quantize_group(job, row, g * GROUP, job->groups + row * groups + g);
}

static void prepare_groups(struct linear_job *job)
{
    job->groups = scratch(SCRATCH_ROWS, (size_t)(job->num_rows * count_groups(job)) * sizeof *job->groups);
    parallel(row_items(job->num_rows), quantize_groups, job);
}

/* The lower and the upper half bytes, each a byte below 16: no sign to care for. */
typedef struct { wholes low, high; } nibbles;

#if defined(ISA_AVX512)
INLINE nibbles load_nibbles(const uint8_t *w)
{
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i both = _mm512_loadu_si512(w);
    return (nibbles){(wholes)_mm512_and_si512(both, mask), (wholes)_mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
}
#elif defined(ISA_AVX2)
INLINE nibbles load_nibbles(const uint8_t *w)
{
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i both = _mm256_loadu_si256((const __m256i *)w);
    return (nibbles){(wholes)_mm256_and_si256(both, mask), (wholes)_mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
#else
INLINE nibbles load_nibbles(const uint8_t *w)
{
    uint8_t low[4 * W], high[4 * W];
    for (int i = 0; i < 4 * W; i++) {
        low[i] = w[i] & 15;
        high[i] = w[i] >> 4;
    }
    return (nibbles){load_wholes(low), load_wholes(high)};
}
#endif

INLINE wholes dot_nibbles(wholes sums, wholes x_low, wholes x_high, nibbles w)
{
#if defined(ISA_AVX2)
    return add_pairs(sums, _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)w.low, (__m256i)x_low),
                                            _mm256_maddubs_epi16((__m256i)w.high, (__m256i)x_high)));
#else
    return dot4(dot4(sums, x_low, w.low), x_high, w.high);
#endif
}

INLINE void fetch_int4_spans(const char *span, const int rows)
{
    enum { SPANS = 4 };
    if (rows >= MANY_QUANTIZED_ROWS)
        UNROLL for (size_t line = 0; line < INT4_SPAN_BYTES; line += 64)
            __builtin_prefetch(span + SPANS * INT4_SPAN_BYTES + line);
}

/* y = sum over groups of (scale * sum of q x + least * sum of x), each sum of q x exact. */
INLINE void multiply_int4(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels,
                          float *to)
{
    const int64_t groups = count_groups(job);
    const char *at[PANEL_GROUP];
    locate_panels(job, panel, panels, panel_bytes(KIND_INT4, job->weight->num_inputs), at);
    const struct quantized_group *x = job->groups + row * groups;
    vf sums[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = vset(0);
    for (int64_t g = 0; g < groups; g++) {
        const size_t span = (size_t)(g / 2 * INT4_SPAN_BYTES), whole = span + (size_t)(8 * PANEL + g % 2 * GROUP * PANEL / 2);
        if (g % 2 == 0)
            fetch_int4_spans(at[0] + span, rows);
        wholes dots[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < panels * VPP; c++)
                dots[r][c] = all_wholes(0);
        UNROLL for (int four = 0; four < GROUP / 8; four++) {
            nibbles both[PANEL_GROUP * VPP];
            UNROLL for (int c = 0; c < panels * VPP; c++)
                both[c] = load_nibbles((const uint8_t *)at[c / VPP] + whole + (four * PANEL + c % VPP * W) * 4);
            UNROLL for (int r = 0; r < rows; r++) {
                const int8_t *group = x[r * groups + g].whole;
                wholes low = all_fours(group + 4 * four), high = all_fours(group + 4 * four + GROUP / 2);
                UNROLL for (int c = 0; c < panels * VPP; c++)
                    dots[r][c] = dot_nibbles(dots[r][c], low, high, both[c]);
            }
        }
        UNROLL for (int c = 0; c < panels * VPP; c++) {
            const uint16_t *halves = (const uint16_t *)(at[c / VPP] + span) + g % 2 * PANEL + c % VPP * W;
            vf scale = vload_f16(halves), least = vload_f16(halves + 2 * PANEL);
            UNROLL for (int r = 0; r < rows; r++) {
                const struct quantized_group *group = x + r * groups + g;
                sums[r][c] = vfma(as_floats(dots[r][c]), vmul(scale, vset(group->scale)), sums[r][c]);
                sums[r][c] = vfma(least, vset(group->sum), sums[r][c]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            vstore(to + r * RESULT_STRIDE + c * W, vmul(sums[r][c], vset(1.0f / INT4_FACTOR)));
}
