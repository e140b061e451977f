/* Attention over a bf16 cache with the processor's products of bf16; the same chunks and the same bookkeeping as in
 * attention.c.
 *
 * Scores are computed transposed, keys times queries: keys come from the cache as they lie there, the lanes of a vector
 * are rows, and the softmax needs no sums across lanes. Weights are rounded to bf16 before they meet the values, as the
 * values are. One shape serves any number of rows: a row is a column of its scores and a row of its output. */

enum { HALF = CHUNK / 2 };
enum { TILES_AT_ONCE = 16, FEW_ROWS = 4 }; /* tiles of 16 rows, for which keys and values are read once */
#define HEADROOM 8.0f /* scores may exceed what weights are relative to by as many powers of two */

struct rows16 {
    uint16_t *q;       /* [dims / 32][16 pairs of dims][16 rows][2] */
    struct row_sums split, whole;
    float position[16], lowest[16];
    int64_t first_position, last_position;
};

struct head_tiles {
    struct rows16 tiles[TILES_AT_ONCE];
    int num_tiles;
    long dims;         /* the head's, padded to a multiple of 32 */
    uint16_t *keys;    /* [CHUNK, dims]: only when the cache cannot be read in place */
    uint16_t *values;  /* [CHUNK / 2][dims][2] */
    float *scores;     /* [CHUNK, 16 rows] */
    uint16_t *weights; /* [16 rows, CHUNK] */
    bool in_place;
};

/* 2^x for x <= 0 with relative error 1e-4, a twentieth of that of bf16; exactly 1 at 0 and 0 at minus infinity. */
INLINE vf vexp2_coarse(vf x)
{
    vf f = _mm512_reduce_ps(x, 0x08 | _MM_FROUND_TO_NEAREST_INT);
    vf y = vfma(f, vset(0x1.c2a218p-5f), vset(0x1.f00c4ep-3f));
    y = vfma(y, f, vset(0x1.62f5fap-1f));
    y = vfma(y, f, vset(1.0f));
    return _mm512_scalef_ps(y, vsub(x, f));
}

INLINE __m512i load_dims(const uint16_t *p, long d, long head_dim)
{
    long rest = head_dim - d;
    return rest >= 32 ? _mm512_loadu_si512(p + d) : _mm512_maskz_loadu_epi16(rest > 0 ? (1u << rest) - 1 : 0, p + d);
}

/* The same of a key or value in the cache, with its scale. */
INLINE __m512i load_cached_dims(const void *row, long d, long head_dim, enum dtype dtype)
{
    if (dtype == BF16)
        return load_dims(row, d, head_dim);
    vf zero = vset(0), low = vload_cached(row, d, head_dim, I8);
    vf high = d + W < head_dim ? vload_cached(row, d + W, head_dim, I8) : zero;
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* 32 dimensions of a query in bf16, as they lie in a register. */
INLINE vf query_dims(const struct attention *a, const void *q, long d)
{
    uint16_t dims[32] = {0};
    if (a->q.dtype == BF16)
        return _mm512_castsi512_ps(load_dims(q, d, a->head_dim));
    for (long j = 0; j < 32 && d + j < a->head_dim; j += W)
        vstore_bf16(dims + j, vload_at(q, d + j, a->head_dim, (enum dtype)a->q.dtype));
    return _mm512_loadu_ps(dims);
}

static void load_rows16(const struct job_of_head *job, const struct head_tiles *h, struct rows16 *tile, int64_t first)
{
    const struct attention *a = job->a;
    int count = (int)min_int(16, job->first_row + job->num_rows - first);
    const void *q[16];
    for (int i = 0; i < count; i++)
        q[i] = head_of_row(job, &a->q, first + i);
    for (long d = 0; d < h->dims; d += 32) {
        vf r[16];
        for (int i = 0; i < 16; i++)
            r[i] = i < count ? query_dims(a, q[i], d) : vset(0);
        transpose(r);
        for (int i = 0; i < 16; i++)
            vstore((float *)(tile->q + d * 16) + i * 16, r[i]);
    }
    for (int i = 0; i < 16; i++) {
        int64_t position = position_of(job, first + (i < count ? i : count - 1));
        tile->position[i] = (float)position;
        tile->lowest[i] = (float)lowest_position(job, position);
    }
    tile->first_position = position_of(job, first);
    tile->last_position = position_of(job, first + count - 1);
}

INLINE void fetch_keys(const struct job_of_head *job, const struct head_tiles *h, const struct chunk *chunk,
                       enum dtype dtype)
{
    for (int p = 0; p < chunk->count; p++)
        for (long d = 0; d < h->dims; d += 32)
            _mm512_storeu_si512(h->keys + p * h->dims + d, load_cached_dims(chunk->keys[p], d, job->a->head_dim, dtype));
}

/* Asks for what will be read next, a few positions at a time between computing: blocks lie anywhere, so that the
 * processor cannot foresee it, and it holds only so many requests: a burst of them stops everything else. */
struct positions_ahead {
    const struct chunk *chunk;
    int next, count;   /* of the chunk's positions; from `count` on there is nothing to ask for */
    int64_t bytes;     /* of a position's keys */
    size_t values;     /* from keys to values, in bytes */
};

INLINE void fetch_positions(struct positions_ahead *ahead, int count)
{
    for (int end = ahead->next + count; ahead->next < end && ahead->next < ahead->count; ahead->next++)
        for (int64_t byte = 0; byte < ahead->bytes; byte += 64) {
            const char *key = ahead->chunk->keys[ahead->next] + byte;
            _mm_prefetch(key, _MM_HINT_T1);
            _mm_prefetch(key + ahead->values, _MM_HINT_T1);
        }
}

/* Values of two positions side by side, dimension by dimension; zeros where there is no position. Within each 32
 * dimensions they come in the order that the processor's unpacking gives: 0-3, 8-11, 16-19, 24-27, then the others. */
INLINE void fetch_values(const struct job_of_head *job, const struct head_tiles *h, const struct chunk *chunk,
                         struct positions_ahead *ahead, enum dtype dtype)
{
    const struct attention *a = job->a;
    for (int p = 0; p < CHUNK; p += 2) {
        if (p % 4 == 0)
            fetch_positions(ahead, 1);
        const void *even = p < chunk->count ? at(chunk->keys[p], keys_to_values(a), dtype) : NULL;
        const void *odd = p + 1 < chunk->count ? at(chunk->keys[p + 1], keys_to_values(a), dtype) : NULL;
        for (long d = 0; d < h->dims; d += 32) {
            __m512i x = even ? load_cached_dims(even, d, a->head_dim, dtype) : _mm512_setzero_si512();
            __m512i y = odd ? load_cached_dims(odd, d, a->head_dim, dtype) : _mm512_setzero_si512();
            uint16_t *to = h->values + (p / 2 * h->dims + d) * 2;
            _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(to + 32, _mm512_unpackhi_epi16(x, y));
        }
    }
}

#if defined(ISA_AMX)
#include "amx_attention.c"
#else
#include "dot_attention.c"
#endif

static void mask_rows16(const struct head_tiles *h, const struct rows16 *tile, int64_t start, int count)
{
    vf last = vload(tile->position), first = vload(tile->lowest), hidden = vset(-INFINITY);
    for (int p = 0; p < count; p++) {
        vf here = vset((float)(start + p));
        vf x = vselect_less(last, here, hidden, vload(h->scores + p * 16));
        vstore(h->scores + p * 16, vselect_less(here, first, hidden, x));
    }
}

/* Scores of half a chunk to weights in bf16, [16 rows][32 positions] of them; adds to the sums. */
INLINE void weigh_half(const struct head_tiles *h, int p, vf scale, vf shift, vf sums[4])
{
    vf r[16];
    UNROLL for (int i = 0; i < 16; i++) {
        vf even = vexp2_coarse(vfma(vload(h->scores + (p + 2 * i) * 16), scale, shift));
        vf odd = vexp2_coarse(vfma(vload(h->scores + (p + 2 * i + 1) * 16), scale, shift));
        sums[i % 2 * 2] = vadd(sums[i % 2 * 2], even);
        sums[i % 2 * 2 + 1] = vadd(sums[i % 2 * 2 + 1], odd);
        const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
        __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
        __m512i high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(odd), half), upper);
        r[i] = _mm512_castsi512_ps(_mm512_or_si512(low, high));
    }
    transpose(r);
    UNROLL for (int i = 0; i < 16; i++)
        _mm512_storeu_ps(h->weights + i * CHUNK + p, r[i]);
}

static void rescale_rows16(const struct head_tiles *h, struct rows16 *tile, vf factor, int num_rows)
{
    float factors[16];
    vstore(factors, factor);
    if (_mm512_cmp_ps_mask(factor, vset(1.0f), _CMP_NEQ_UQ) == 0)
        return; /* a product with one changes no bit */
    for (int r = 0; r < num_rows; r++)
        for (long d = 0; d < h->dims; d += W)
            vstore(tile->split.out + r * h->dims + d, vmul(vload(tile->split.out + r * h->dims + d), vset(factors[r])));
}

/* Weights are relative to the highest score of some chunk before, as long as that is high enough: each row's own affair,
 * and rescaling what was summed becomes rare. */
INLINE vf reference(vf before, vf highest, vf scale)
{
    return vselect_less(vset(HEADROOM), vmul(vsub(highest, before), scale), highest, before);
}

static void weigh_rows16(const struct attention *a, const struct head_tiles *h, struct rows16 *tile, int count)
{
    vf before = vload(tile->split.highest), scale = vset(query_scale(a)), sums[4], highest[4];
    UNROLL for (int i = 0; i < 4; i++)
        highest[i] = before;
    for (int p = 0; p < count; p += 4)
        UNROLL for (int i = 0; i < 4; i++)
            highest[i] = vmax(highest[i], vload(h->scores + (p + i) * 16));
    vf now = reference(before, vmax(vmax(highest[0], highest[1]), vmax(highest[2], highest[3])), scale);
    UNROLL for (int i = 0; i < 4; i++)
        sums[i] = vset(0);
    vf shift = vmul(vsub(vset(0), now), scale);
    for (int p = 0; p < count; p += HALF)
        weigh_half(h, p, scale, shift, sums);
    vf factor = vexp2_coarse(vmul(vsub(before, now), scale));
    rescale_rows16(h, tile, factor, 16);
    vstore(tile->split.highest, now);
    vstore(tile->split.sum, vfma(vload(tile->split.sum), factor, vadd(vadd(sums[0], sums[1]), vadd(sums[2], sums[3]))));
}

/* ---- at most four rows ----
 *
 * As above, number by number, but with four positions by four rows in a vector: a quarter of the vectors. */

#define QUARTERS(x, order) _mm512_shuffle_f32x4(x, x, order)

/* Weights of 16 positions, four to a vector, to one vector for each of the rows; position 4 j + c comes as number 4 c + j. */
INLINE void transpose_4rows(const vf w[4], __m512i rows[4])
{
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(w[0], w[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(w[0], w[1]));
    __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(w[2], w[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(w[2], w[3]));
    rows[0] = _mm512_castpd_si512(_mm512_unpacklo_pd(a, c));
    rows[1] = _mm512_castpd_si512(_mm512_unpackhi_pd(a, c));
    rows[2] = _mm512_castpd_si512(_mm512_unpacklo_pd(b, d));
    rows[3] = _mm512_castpd_si512(_mm512_unpackhi_pd(b, d));
}

INLINE void store_4rows(const struct head_tiles *h, const vf weights[CHUNK / 4])
{
    uint16_t order[32]; /* the upper halves of two vectors' numbers, by position */
    UNROLL for (int p = 0; p < 32; p++)
        order[p] = (uint16_t)(p / 16 * 32 + (p % 4 * 4 + p % 16 / 4) * 2 + 1);
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_loadu_si512(order);
    UNROLL for (int p = 0; p < CHUNK; p += 32) {
        __m512i first[4], second[4];
        transpose_4rows(weights + p / 4, first);
        transpose_4rows(weights + p / 4 + 4, second);
        UNROLL for (int r = 0; r < 4; r++) {
            __m512i x = _mm512_add_epi32(first[r], half), y = _mm512_add_epi32(second[r], half);
            _mm512_storeu_si512(h->weights + r * CHUNK + p, _mm512_permutex2var_epi16(x, upper, y));
        }
    }
}

static void mask_4rows(const struct rows16 *tile, int64_t start, vf scores[CHUNK / 4])
{
    vf last = _mm512_broadcast_f32x4(_mm_loadu_ps(tile->position)), hidden = vset(-INFINITY);
    vf first = _mm512_broadcast_f32x4(_mm_loadu_ps(tile->lowest));
    const vf offsets = _mm512_set_ps(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    UNROLL for (int i = 0; i < CHUNK / 4; i++) {
        vf here = vadd(vset((float)(start + 4 * i)), offsets), x = vselect_less(last, here, hidden, scores[i]);
        scores[i] = vselect_less(here, first, hidden, x);
    }
}

static void weigh_4rows(const struct attention *a, const struct head_tiles *h, struct rows16 *tile, vf w[CHUNK / 4],
                        struct positions_ahead *ahead)
{
    vf scale = vset(query_scale(a)), sums = vset(0);
    vf before = _mm512_broadcast_f32x4(_mm_loadu_ps(tile->split.highest)), highest = before;
    UNROLL for (int i = 0; i < CHUNK / 4; i++)
        highest = vmax(highest, w[i]);
    fetch_positions(ahead, 4);
    highest = vmax(highest, QUARTERS(highest, 0x4e));
    vf now = reference(before, vmax(highest, QUARTERS(highest, 0xb1)), scale);
    vf shift = vmul(vsub(vset(0), now), scale);
    UNROLL for (int i = 0; i < CHUNK / 4; i++) {
        w[i] = vexp2_coarse(vfma(w[i], scale, shift));
        sums = vadd(sums, w[i]);
    }
    fetch_positions(ahead, 4);
    store_4rows(h, w);
    fetch_positions(ahead, 4);
    vf factor = vexp2_coarse(vmul(vsub(before, now), scale));
    rescale_rows16(h, tile, factor, 4);
    sums = vadd(sums, QUARTERS(sums, 0xb1));
    sums = vfma(_mm512_broadcast_f32x4(_mm_loadu_ps(tile->split.sum)), factor, vadd(sums, QUARTERS(sums, 0x4e)));
    _mm_storeu_ps(tile->split.highest, _mm512_castps512_ps128(now));
    _mm_storeu_ps(tile->split.sum, _mm512_castps512_ps128(sums));
}

static void attend_rows16(const struct job_of_head *job, const struct head_tiles *h, struct rows16 *tile,
                          const struct chunk *chunk, struct positions_ahead *ahead)
{
    bool masked = chunk->start + CHUNK - 1 > tile->first_position || chunk->start < lowest_position(job, tile->last_position);
    if (job->num_rows <= FEW_ROWS) {
        vf scores[CHUNK / 4];
        score_4rows(job, h, tile, chunk, ahead, scores);
        fetch_positions(ahead, 4);
        if (masked)
            mask_4rows(tile, chunk->start, scores);
        weigh_4rows(job->a, h, tile, scores, ahead);
        fetch_positions(ahead, 4);
        gather_4rows(job, h, tile, chunk, ahead);
    } else {
        /* What only later rows see would weigh 0. */
        int count = (int)min_int(chunk->count, tile->last_position + 1 - chunk->start);
        int in_halves = (count + HALF - 1) / HALF * HALF;
        score_rows16(job, h, tile, chunk, count, ahead);
        fetch_positions(ahead, 4);
        if (masked)
            mask_rows16(h, tile, chunk->start, in_halves);
        weigh_rows16(job->a, h, tile, in_halves);
        fetch_positions(ahead, 4);
        gather_rows16(h, tile, count, ahead);
    }
}

static void store_rows16(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile, int64_t first)
{
    const struct attention *a = job->a;
    enum dtype dtype = (enum dtype)a->out.dtype;
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int r = 0; r < 16 && first + r < job->first_row + job->num_rows; r++) {
        void *to = head_of_row(job, &a->out, first + r);
        vf inverse = vset(1.0f / tile->whole.sum[r]);
        for (long d = 0; d < a->head_dim; d += 32) { /* back from the order of fetch_values */
            vf x = vmul(without_minus(vload(tile->whole.out + r * h->dims + d)), inverse);
            vf y = vmul(without_minus(vload(tile->whole.out + r * h->dims + d + 16)), inverse);
            vstore_at(to, d, a->head_dim, _mm512_permutex2var_ps(x, low, y), dtype);
            if (d + 16 < a->head_dim)
                vstore_at(to, d + 16, a->head_dim, _mm512_permutex2var_ps(x, high, y), dtype);
        }
    }
}

/* Of a tile: others are computed by products that cannot leave them out, and never looked at. */
INLINE int rows_kept(int64_t num_rows)
{
    return num_rows <= FEW_ROWS ? FEW_ROWS : 16;
}

static void lay_out_head(struct head_tiles *h, const struct attention *a, int64_t num_rows)
{
    h->num_tiles = (int)((num_rows + 15) / 16);
    h->dims = (long)round_up(a->head_dim, 32);
    h->in_place = a->cache_dtype == BF16 && a->block_size % 16 == 0 && a->head_dim == h->dims;
    size_t dims = (size_t)h->dims, chunk = dims * CHUNK * 2, tile = dims * 16 * (2 + 4 + 4);
    char *memory = scratch(SCRATCH_TILE, 2 * chunk + CHUNK * 16 * (4 + 2) + (size_t)h->num_tiles * tile);
    h->keys = (uint16_t *)memory;
    h->values = (uint16_t *)(memory + chunk);
    h->scores = (float *)(memory + 2 * chunk);
    h->weights = (uint16_t *)(memory + 2 * chunk + CHUNK * 16 * 4);
    memory += 2 * chunk + CHUNK * 16 * (4 + 2);
    for (int i = 0; i < h->num_tiles; i++, memory += tile) {
        h->tiles[i].split.out = (float *)memory;
        h->tiles[i].whole.out = (float *)(memory + dims * 16 * 4);
        h->tiles[i].q = (uint16_t *)(memory + dims * 16 * 8);
        begin_sums(&h->tiles[i].split, rows_kept(num_rows), h->dims);
        begin_sums(&h->tiles[i].whole, rows_kept(num_rows), h->dims);
    }
}

static void add_split16(const struct attention *a, const struct head_tiles *h, struct rows16 *tile,
                        const struct row_sums *split, int num_rows)
{
    add_split(&tile->whole, split, num_rows, h->dims, vset(query_scale(a)), vexp2_coarse);
}

static void end_split(const struct job_of_head *job, struct head_tiles *h)
{
    for (int i = 0; i < h->num_tiles; i++) {
        add_split16(job->a, h, &h->tiles[i], &h->tiles[i].split, rows_kept(job->num_rows));
        begin_sums(&h->tiles[i].split, rows_kept(job->num_rows), h->dims);
    }
}

/* With more rows there is more to compute than to read, and other rows have just read the same. */
INLINE bool waits_for_memory(const struct job_of_head *job)
{
    return job->num_rows <= 16;
}

/* While the last chunk is computed, the first one of `next` is asked for, if there is one. */
INLINE void attend_chunks(const struct job_of_head *job, const struct job_of_head *next, struct head_tiles *h,
                          enum dtype dtype)
{
    struct chunk chunks[2], *chunk = chunks;
    struct positions_ahead ahead;
    ahead.bytes = row_width(job->a->head_dim, dtype) * (int64_t)dtype_bytes(dtype);
    ahead.values = keys_to_values(job->a) * dtype_bytes(dtype);
    locate(job, job->start, chunk, dtype);
    for (int64_t start = job->start; start < job->end; start += CHUNK) {
        const struct job_of_head *then = start + CHUNK < job->end ? job : next;
        struct chunk *following = chunk == chunks ? chunks + 1 : chunks;
        if (then != NULL)
            locate(then, then == job ? start + CHUNK : then->start, following, dtype);
        ahead.chunk = following;
        ahead.next = 0;
        ahead.count = then != NULL && waits_for_memory(then) ? following->count : 0;
        if (!h->in_place)
            fetch_keys(job, h, chunk, dtype);
        if (!gathers_in_place(job, h))
            fetch_values(job, h, chunk, &ahead, dtype);
        for (int i = 0; i < h->num_tiles; i++)
            if (start <= h->tiles[i].last_position)
                attend_rows16(job, h, &h->tiles[i], chunk, &ahead);
        fetch_positions(&ahead, CHUNK);
        chunk = following;
        if (job->part == NULL && ends_split(job, start))
            end_split(job, h);
    }
}

static void store_head(const struct job_of_head *job, const struct head_tiles *h)
{
    for (int i = 0; i < h->num_tiles; i++)
        store_rows16(job, h, &h->tiles[i], job->first_row + 16 * i);
}

static void attend_tiles(const struct job_of_head *job, const struct job_of_head *next)
{
    struct head_tiles h;
    lay_out_head(&h, job->a, job->num_rows);
    for (int i = 0; i < h.num_tiles; i++)
        load_rows16(job, &h, &h.tiles[i], job->first_row + 16 * i);
    begin_products(&h);
    if (job->a->cache_dtype == I8)
        attend_chunks(job, next, &h, I8);
    else
        attend_chunks(job, next, &h, BF16);
    end_products();
    if (job->part == NULL)
        store_head(job, &h);
    else
        leave_part(job->part, &h.tiles[0].split, (int)job->num_rows, h.dims);
}

static void join_tiles(const struct job_of_head *job, const struct shares *shares, int64_t first, int64_t count)
{
    struct head_tiles h;
    lay_out_head(&h, job->a, job->num_rows);
    for (int64_t i = first; i < first + count; i++)
        add_split16(job->a, &h, &h.tiles[0], part_of(shares, i), (int)job->num_rows);
    store_head(job, &h);
}
