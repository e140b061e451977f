/* The products of bf16_attention.c in vectors of pairs. Each number is one chain of pairs in order, of dimensions or of
 * positions. */

static void begin_products(const struct head_tiles *h)
{
    (void)h;
}

static void end_products(void)
{
}

enum { KEYS_AT_ONCE = 8, ROWS_AT_ONCE = 8 };

/* scores[CHUNK][16 rows] of `count` positions, in strips of keys; what stands beyond them is masked. */
static void score_rows16(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile,
                         const struct chunk *chunk, int count, struct positions_ahead *ahead)
{
    long stride = h->in_place ? job->a->head_dim : h->dims;
    for (int p = 0; p < count; p += KEYS_AT_ONCE) {
        const uint16_t *keys = h->in_place ? (const uint16_t *)chunk->keys[p] : h->keys + p * stride;
        vf sums[KEYS_AT_ONCE];
        UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
            sums[i] = vset(0);
        for (long d = 0; d < h->dims; d += 2) {
            __m512bh q = (__m512bh)_mm512_loadu_si512(tile->q + d * 16);
            UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
                sums[i] = _mm512_dpbf16_ps(sums[i], q, all_pairs(keys + i * stride + d));
        }
        UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
            vstore(h->scores + (p + i) * 16, sums[i]);
        fetch_positions(ahead, KEYS_AT_ONCE);
    }
}

/* 16 pairs of dimensions of four keys, four pairs to a vector: those of the first key, of the second, ... */
struct pairs_of_4keys {
    __m512i four[4];
};

INLINE struct pairs_of_4keys load_4keys(const uint16_t *const keys[4], long d)
{
    __m512i x[4], t[4];
    UNROLL for (int i = 0; i < 4; i++)
        x[i] = _mm512_loadu_si512(keys[i] + d);
    UNROLL for (int i = 0; i < 2; i++) {
        t[i] = _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0x44);
        t[2 + i] = _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0xee);
    }
    struct pairs_of_4keys pairs;
    UNROLL for (int i = 0; i < 2; i++) {
        pairs.four[2 * i] = _mm512_shuffle_i32x4(t[2 * i], t[2 * i + 1], 0x88);
        pairs.four[2 * i + 1] = _mm512_shuffle_i32x4(t[2 * i], t[2 * i + 1], 0xdd);
    }
    return pairs;
}

enum { FOURS_AT_ONCE = 4 };

/* Scores of four positions by four rows in a vector. */
INLINE void score_fours(const struct head_tiles *h, const struct rows16 *tile, const struct chunk *chunk, int p,
                        vf scores[FOURS_AT_ONCE])
{
    const uint16_t *keys[FOURS_AT_ONCE][4];
    UNROLL for (int i = 0; i < FOURS_AT_ONCE * 4; i++) {
        int k = p + i < chunk->count ? p + i : 0; /* beyond the positions: masked */
        keys[i / 4][i % 4] = h->in_place ? (const uint16_t *)chunk->keys[k] : h->keys + k * h->dims;
    }
    UNROLL for (int i = 0; i < FOURS_AT_ONCE; i++)
        scores[i] = vset(0);
    for (long d = 0; d < h->dims; d += 32) {
        struct pairs_of_4keys pairs[FOURS_AT_ONCE];
        UNROLL for (int i = 0; i < FOURS_AT_ONCE; i++)
            pairs[i] = load_4keys(keys[i], d);
        UNROLL for (int pair = 0; pair < 16; pair++) {
            const __m128i *rows = (const __m128i *)(tile->q + (d + 2 * pair) * 16);
            __m512bh q = (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128(rows));
            UNROLL for (int i = 0; i < FOURS_AT_ONCE; i++) {
                __m512i four = pairs[i].four[pair / 4];
                __m512i each = pair % 4 == 0   ? _mm512_shuffle_epi32(four, 0x00)
                               : pair % 4 == 1 ? _mm512_shuffle_epi32(four, 0x55)
                               : pair % 4 == 2 ? _mm512_shuffle_epi32(four, 0xaa)
                                               : _mm512_shuffle_epi32(four, 0xff);
                scores[i] = _mm512_dpbf16_ps(scores[i], q, (__m512bh)each);
            }
        }
    }
}

static void score_4rows(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile,
                        const struct chunk *chunk, struct positions_ahead *ahead, vf scores[CHUNK / 4])
{
    (void)job;
    for (int i = 0; i < CHUNK / 4; i += FOURS_AT_ONCE) {
        vf some[FOURS_AT_ONCE];
        score_fours(h, tile, chunk, 4 * i, some);
        UNROLL for (int k = 0; k < FOURS_AT_ONCE; k++)
            scores[i + k] = some[k];
        fetch_positions(ahead, 4);
    }
}

/* A row's sums over positions, 32 dimensions of them, in the order of fetch_values. */
struct dims32 {
    vf low, high;
};

INLINE struct dims32 load_out(const float *out)
{
    return (struct dims32){vload(out), vload(out + W)};
}

INLINE void store_out(float *out, struct dims32 x)
{
    vstore(out, x.low);
    vstore(out + W, x.high);
}

/* Two positions' weights times their values side by side. */
INLINE struct dims32 add_pair(struct dims32 sum, const uint16_t *weights, __m512i low, __m512i high)
{
    __m512bh weight = all_pairs(weights);
    sum.low = _mm512_dpbf16_ps(sum.low, weight, (__m512bh)low);
    sum.high = _mm512_dpbf16_ps(sum.high, weight, (__m512bh)high);
    return sum;
}

/* Rows from `first`, 32 dimensions from `d`, of `count` positions: an odd one has a neighbour that weighs 0. */
INLINE void gather_dims(const struct head_tiles *h, const struct rows16 *tile, int first, const int rows, int count, long d)
{
    const uint16_t *values = h->values + d * 2, *weights = h->weights + first * CHUNK;
    float *out = tile->split.out + first * h->dims + d;
    struct dims32 sums[ROWS_AT_ONCE];
    UNROLL for (int r = 0; r < rows; r++)
        sums[r] = load_out(out + r * h->dims);
    for (long p = 0; p < count; p += 2) {
        __m512i low = _mm512_load_si512(values + p * h->dims), high = _mm512_load_si512(values + p * h->dims + 32);
        UNROLL for (int r = 0; r < rows; r++)
            sums[r] = add_pair(sums[r], weights + r * CHUNK + p, low, high);
    }
    UNROLL for (int r = 0; r < rows; r++)
        store_out(out + r * h->dims, sums[r]);
}

static void gather_rows16(const struct head_tiles *h, const struct rows16 *tile, int count, struct positions_ahead *ahead)
{
    for (long d = 0; d < h->dims; d += 32) {
        for (int first = 0; first < 16; first += ROWS_AT_ONCE)
            gather_dims(h, tile, first, ROWS_AT_ONCE, count, d);
        fetch_positions(ahead, 8);
    }
}

/* Values that only a few rows need are not worth a copy. */
INLINE bool gathers_in_place(const struct job_of_head *job, const struct head_tiles *h)
{
    return h->in_place && job->num_rows <= FEW_ROWS;
}

/* As gather_dims does, from the cache: positions that are not there would add nothing. */
INLINE void gather_dims_in_place(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile,
                                 const struct chunk *chunk, struct positions_ahead *ahead, const int rows, long d)
{
    size_t to_values = keys_to_values(job->a);
    float *out = tile->split.out + d;
    struct dims32 sums[FEW_ROWS];
    UNROLL for (int r = 0; r < rows; r++)
        sums[r] = load_out(out + r * h->dims);
    for (int p = 0; p < chunk->count; p += 2) {
        const uint16_t *even = (const uint16_t *)chunk->keys[p] + to_values + d;
        __m512i x = _mm512_loadu_si512(even), y = _mm512_setzero_si512();
        if (p + 1 < chunk->count)
            y = _mm512_loadu_si512((const uint16_t *)chunk->keys[p + 1] + to_values + d);
        __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
        UNROLL for (int r = 0; r < rows; r++)
            sums[r] = add_pair(sums[r], h->weights + r * CHUNK + p, low, high);
        if (p % 8 == 0)
            fetch_positions(ahead, 1);
    }
    UNROLL for (int r = 0; r < rows; r++)
        store_out(out + r * h->dims, sums[r]);
}

static void gather_4rows(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile,
                         const struct chunk *chunk, struct positions_ahead *ahead)
{
    for (long d = 0; d < h->dims; d += 32) {
        if (!gathers_in_place(job, h))
            gather_dims(h, tile, 0, FEW_ROWS, chunk->count, d);
        else if (job->num_rows == 1)
            gather_dims_in_place(job, h, tile, chunk, ahead, 1, d);
        else if (job->num_rows == 2)
            gather_dims_in_place(job, h, tile, chunk, ahead, 2, d);
        else if (job->num_rows == 3)
            gather_dims_in_place(job, h, tile, chunk, ahead, 3, d);
        else
            gather_dims_in_place(job, h, tile, chunk, ahead, FEW_ROWS, d);
        fetch_positions(ahead, 4);
    }
}
