/* Causal attention straight from the paged cache, with an online softmax (Milakov and Gimelshein, 2018; Dao, 2022).
 *
 * A row is one query head of one token. The rows of a token that share a key/value head are computed together, so that
 * keys and values are read once for them. Positions are taken in chunks of CHUNK counted from position 0, and a row sees
 * the same chunks in the same order with the same arithmetic however it is grouped with others:
 *   score    one chain of multiply-adds over the head's dimensions
 *   weight   2^(score - highest score so far); masked positions weigh exactly 0
 *   sum      of a chunk's weights: W interleaved chains, then a tree
 *   output   one chain of multiply-adds over the positions, rescaled chunk by chunk
 * All this begins anew every SPLIT positions, and what the splits came to is added up in their order: threads may share
 * a long context, each taking whole splits of it.
 * Two shapes of loop do this: `few` for a handful of rows (decoding), lanes along positions and dimensions, and `tile`
 * for many rows (prompts), lanes along rows. A chunk or split that is all masked for a row leaves it unchanged to the bit,
 * but for the sign of a zero, which is none in the end. */

#define CHUNK 64
#define SPLIT 512 /* whole chunks */
#define TILE_ROWS (2 * W)
#define LOWEST (-1e30f) /* the highest score of no position: finite, so that differences are numbers */

enum { MOST_SUMS = 16 };

/* Of a handful of rows over some positions, relative to each row's highest score there. */
struct row_sums {
    float *out; /* [rows, dims], unnormalized */
    float highest[MOST_SUMS], sum[MOST_SUMS];
};

struct job_of_head {
    const struct attention *a;
    const int32_t *table;
    int64_t sequence;
    int64_t first_row, num_rows; /* of the sequence's token-and-head rows for this key/value head */
    int64_t query_start, num_queries, context_len;
    int64_t start, end; /* the positions that its rows see, from the beginning of a chunk; or one split of them */
    struct row_sums *part; /* takes what that split comes to; null: the job is about all that its rows see */
    int kv_head, group;
};

INLINE int64_t position_of(const struct job_of_head *job, int64_t row)
{
    return job->context_len - job->num_queries + row / job->group;
}

INLINE int64_t lowest_position(const struct job_of_head *job, int64_t position)
{
    int64_t window = job->a->window;
    return window > 0 && position >= window ? position - window + 1 : 0;
}

INLINE void *head_of_row(const struct job_of_head *job, const struct rows *x, int64_t row)
{
    int64_t head = job->kv_head * job->group + row % job->group;
    return at_mut(row_of(x, job->query_start + row / job->group), (size_t)(head * job->a->head_dim), (enum dtype)x->dtype);
}

/* Positions `start` to `start + count` of a sequence, and where their keys are. */
struct chunk {
    const char *keys[CHUNK];
    int64_t start;
    int count;
};

INLINE void locate(const struct job_of_head *job, int64_t start, struct chunk *chunk, enum dtype dtype)
{
    const struct attention *a = job->a;
    int64_t width = row_width(a->head_dim, dtype) * (int64_t)dtype_bytes(dtype);
    int64_t index = start / a->block_size, offset = start % a->block_size;
    chunk->start = start;
    chunk->count = (int)min_int(CHUNK, job->end - start);
    for (int p = 0; p < chunk->count; index++, offset = 0) {
        int64_t block = job->table[index] * a->cache_stride * (int64_t)dtype_bytes(dtype);
        const char *first = (const char *)a->cache + block + (job->kv_head * a->block_size + offset) * width;
        int count = (int)min_int(chunk->count - p, a->block_size - offset);
        for (int i = 0; i < count; i++)
            chunk->keys[p + i] = first + i * width;
        p += count;
    }
}

INLINE size_t keys_to_values(const struct attention *a)
{
    return (size_t)a->num_kv_heads * a->block_size * row_width(a->head_dim, (enum dtype)a->cache_dtype);
}

INLINE float query_scale(const struct attention *a)
{
    return a->scale * 0x1.715476p0f; /* log2(e): weights are powers of two */
}

#if defined(ISA_AVX512)
INLINE void transpose(vf r[W])
{
    __m512d t[W];
    UNROLL for (int i = 0; i < 16; i += 4) {
        vf a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
        vf c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c));
        t[i + 1] = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c));
        t[i + 2] = _mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d));
        t[i + 3] = _mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        vf a = _mm512_castpd_ps(t[i]), b = _mm512_castpd_ps(t[i + 4]);
        vf c = _mm512_castpd_ps(t[i + 8]), d = _mm512_castpd_ps(t[i + 12]);
        vf even_low = _mm512_shuffle_f32x4(a, b, 0x88), odd_low = _mm512_shuffle_f32x4(a, b, 0xdd);
        vf even_high = _mm512_shuffle_f32x4(c, d, 0x88), odd_high = _mm512_shuffle_f32x4(c, d, 0xdd);
        r[i] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        r[i + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        r[i + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
}
#elif defined(ISA_AVX2)
INLINE void transpose(vf r[W])
{
    vf t[W];
    UNROLL for (int i = 0; i < 8; i += 4) {
        __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[i], r[i + 1]));
        __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(r[i], r[i + 1]));
        __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r[i + 2], r[i + 3]));
        __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[i + 2], r[i + 3]));
        t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
        t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
        t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
        t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}
#else
INLINE void transpose(vf r[W])
{
    vf a = r[0], b = r[1], c = r[2], d = r[3];
    r[0] = (vf){a[0], b[0], c[0], d[0]};
    r[1] = (vf){a[1], b[1], c[1], d[1]};
    r[2] = (vf){a[2], b[2], c[2], d[2]};
    r[3] = (vf){a[3], b[3], c[3], d[3]};
}
#endif

/* ---- splits ---- */

static void begin_sums(struct row_sums *sums, int num_rows, long dims)
{
    memset(sums->out, 0, sizeof(float) * (size_t)(num_rows * dims));
    for (int r = 0; r < MOST_SUMS; r++) {
        sums->highest[r] = LOWEST;
        sums->sum[r] = 0;
    }
}

/* Adds a split to those before it. One in which a row saw nothing changes no bit of it but the sign of a zero. `power`
 * is that of two. */
INLINE void add_split(struct row_sums *whole, const struct row_sums *split, int num_rows, long dims, vf scale, vf (*power)(vf))
{
    float kept[MOST_SUMS], added[MOST_SUMS];
    for (int r = 0; r < MOST_SUMS; r += W) {
        vf before = vload(whole->highest + r), here = vload(split->highest + r), now = vmax(before, here);
        vf keep = power(vmul(vsub(before, now), scale)), add = power(vmul(vsub(here, now), scale));
        vstore(whole->sum + r, vfma(vload(split->sum + r), add, vmul(vload(whole->sum + r), keep)));
        vstore(whole->highest + r, now);
        vstore(kept + r, keep);
        vstore(added + r, add);
    }
    for (int r = 0; r < num_rows; r++)
        for (long d = 0; d < dims; d += W) {
            vf before = vmul(vload(whole->out + r * dims + d), vset(kept[r]));
            vstore(whole->out + r * dims + d, vfma(vload(split->out + r * dims + d), vset(added[r]), before));
        }
}

/* What `part` has behind it takes the rows. */
static void leave_part(struct row_sums *part, const struct row_sums *split, int num_rows, long dims)
{
    part->out = (float *)(part + 1);
    memcpy(part->highest, split->highest, sizeof part->highest);
    memcpy(part->sum, split->sum, sizeof part->sum);
    memcpy(part->out, split->out, sizeof(float) * (size_t)(num_rows * dims));
}

/* Whether a split ends with the chunk that begins at `start`, or all that the job is about. */
INLINE int ends_split(const struct job_of_head *job, int64_t start)
{
    return (start + CHUNK) % SPLIT == 0 || start + CHUNK >= job->end;
}

/* A zero's sign would tell of chunks and splits that only other rows saw. */
INLINE vf without_minus(vf out)
{
    return vadd(out, vset(0));
}

/* ---- a handful of rows ---- */

enum { FEW = 4, MAX_FEW_ROWS = 8 };

struct few {
    float *q;      /* [rows, dims], scaled */
    float *keys;   /* [dims, CHUNK] */
    float weights[MAX_FEW_ROWS][CHUNK];
    struct row_sums split, whole;
    long dims;     /* the head's, padded to a multiple of W */
};

INLINE void transpose_keys(const struct job_of_head *job, const struct few *f, const struct chunk *chunk, enum dtype dtype)
{
    long head_dim = job->a->head_dim;
    for (int p = 0; p < CHUNK; p += W)
        for (long d = 0; d < f->dims; d += W) {
            vf r[W];
            UNROLL for (int i = 0; i < W; i++)
                r[i] = p + i < chunk->count ? vload_cached(chunk->keys[p + i], d, head_dim, dtype) : vset(0);
            transpose(r);
            UNROLL for (int i = 0; i < W; i++)
                vstore(f->keys + (d + i) * CHUNK + p, r[i]);
        }
}

INLINE void score_few(struct few *f, int first, const int rows, long head_dim)
{
    for (int p = 0; p < CHUNK; p += 4 * W > CHUNK ? CHUNK : 4 * W) {
        vf sums[FEW][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 4; c++)
                sums[r][c] = vset(0);
        for (long d = 0; d < head_dim; d++)
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int c = 0; c < 4; c++)
                    sums[r][c] = vfma(vset(f->q[(first + r) * f->dims + d]), vload(f->keys + d * CHUNK + p + c * W),
                                      sums[r][c]);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 4; c++)
                vstore(&f->weights[first + r][p + c * W], sums[r][c]);
    }
}

/* Scores to weights; returns the factor for what was summed before. */
static float weigh_few(struct few *f, int row, int64_t start, int64_t lowest, int64_t position)
{
    float *w = f->weights[row];
    for (int p = 0; p < CHUNK; p++)
        if (start + p < lowest || start + p > position)
            w[p] = -INFINITY;
    vf highest = vload(w);
    for (int p = W; p < CHUNK; p += W)
        highest = vmax(highest, vload(w + p));
    float before = f->split.highest[row], now = vhighest(highest);
    now = now > before ? now : before;
    vf sums = vset(0);
    for (int p = 0; p < CHUNK; p += W) {
        vf weight = vexp2(vsub(vload(w + p), vset(now)));
        vstore(w + p, weight);
        sums = vadd(sums, weight);
    }
    float factor[W], sum[W];
    vstore(factor, vexp2(vset(before - now)));
    vstore(sum, vfma(vset(f->split.sum[row]), vset(factor[0]), vset(vsum(sums))));
    f->split.sum[row] = sum[0];
    f->split.highest[row] = now;
    return factor[0];
}

INLINE void gather_few(const struct job_of_head *job, struct few *f, int first, const int rows, const float *factors,
                       const struct chunk *chunk, enum dtype dtype)
{
    const struct attention *a = job->a;
    for (long d = 0; d < f->dims; d += 4 * W) {
        vf sums[FEW][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 4; c++)
                sums[r][c] = d + c * W < f->dims ? vmul(vload(f->split.out + (first + r) * f->dims + d + c * W),
                                                        vset(factors[first + r])) : vset(0);
        for (int p = 0; p < chunk->count; p++) {
            const void *values = at(chunk->keys[p], keys_to_values(a), dtype);
            UNROLL for (int c = 0; c < 4; c++) {
                vf v = d + c * W < f->dims ? vload_cached(values, d + c * W, a->head_dim, dtype) : vset(0);
                UNROLL for (int r = 0; r < rows; r++)
                    sums[r][c] = vfma(vset(f->weights[first + r][p]), v, sums[r][c]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 4; c++)
                if (d + c * W < f->dims)
                    vstore(f->split.out + (first + r) * f->dims + d + c * W, sums[r][c]);
    }
}

INLINE void attend_few_chunk(const struct job_of_head *job, struct few *f, int64_t start, enum dtype dtype)
{
    float factors[MAX_FEW_ROWS];
    struct chunk chunk;
    locate(job, start, &chunk, dtype);
    transpose_keys(job, f, &chunk, dtype);
    for (int first = 0; first < job->num_rows; first += FEW) {
        int rows = (int)min_int(FEW, job->num_rows - first);
        switch (rows) {
        case 1: score_few(f, first, 1, job->a->head_dim); break;
        case 2: score_few(f, first, 2, job->a->head_dim); break;
        case 3: score_few(f, first, 3, job->a->head_dim); break;
        default: score_few(f, first, FEW, job->a->head_dim);
        }
        for (int r = first; r < first + rows; r++) {
            int64_t position = position_of(job, job->first_row + r);
            factors[r] = weigh_few(f, r, start, lowest_position(job, position), position);
        }
        switch (rows) {
        case 1: gather_few(job, f, first, 1, factors, &chunk, dtype); break;
        case 2: gather_few(job, f, first, 2, factors, &chunk, dtype); break;
        case 3: gather_few(job, f, first, 3, factors, &chunk, dtype); break;
        default: gather_few(job, f, first, FEW, factors, &chunk, dtype);
        }
    }
}

static void load_few_queries(const struct job_of_head *job, struct few *f)
{
    const struct attention *a = job->a;
    for (int r = 0; r < job->num_rows; r++) {
        const void *q = head_of_row(job, &a->q, job->first_row + r);
        for (long d = 0; d < f->dims; d += W) {
            vf x = vload_at(q, d, a->head_dim, (enum dtype)a->q.dtype);
            vstore(f->q + r * f->dims + d, vmul(x, vset(query_scale(a))));
        }
    }
}

static void store_few(const struct job_of_head *job, const struct few *f)
{
    const struct attention *a = job->a;
    for (int r = 0; r < job->num_rows; r++)
        for (long d = 0; d < a->head_dim; d += W)
            vstore_at(head_of_row(job, &a->out, job->first_row + r), d, a->head_dim,
                      vdiv(without_minus(vload(f->whole.out + r * f->dims + d)), vset(f->whole.sum[r])),
                      (enum dtype)a->out.dtype);
}

static void lay_out_few(const struct job_of_head *job, struct few *f)
{
    f->dims = (long)round_up(job->a->head_dim, W);
    f->q = scratch(SCRATCH_TILE, sizeof(float) * (size_t)f->dims * (3 * MAX_FEW_ROWS + CHUNK));
    f->split.out = f->q + MAX_FEW_ROWS * f->dims;
    f->whole.out = f->split.out + MAX_FEW_ROWS * f->dims;
    f->keys = f->whole.out + MAX_FEW_ROWS * f->dims;
    begin_sums(&f->split, MAX_FEW_ROWS, f->dims);
    begin_sums(&f->whole, MAX_FEW_ROWS, f->dims);
}

static void add_few_split(const struct job_of_head *job, struct few *f, const struct row_sums *split)
{
    add_split(&f->whole, split, (int)job->num_rows, f->dims, vset(1), vexp2);
}

static void attend_few(const struct job_of_head *job)
{
    struct few f;
    lay_out_few(job, &f);
    load_few_queries(job, &f);
    for (int64_t start = job->start; start < job->end; start += CHUNK) {
        FOR_CACHE_DTYPE(job->a->cache_dtype, attend_few_chunk(job, &f, start, dtype));
        if (job->part == NULL && ends_split(job, start)) {
            add_few_split(job, &f, &f.split);
            begin_sums(&f.split, (int)job->num_rows, f.dims);
        }
    }
    if (job->part == NULL)
        store_few(job, &f);
    else
        leave_part(job->part, &f.split, (int)job->num_rows, f.dims);
}

/* ---- many rows ---- */

#if defined(ISA_AVX512)
#define STRIP 8
#else
#define STRIP 4
#endif

struct tile {
    float *q;       /* [dims, TILE_ROWS], scaled */
    float *out;     /* [dims, TILE_ROWS], unnormalized, of the split */
    float *whole;   /* of the splits before it */
    float *keys;    /* [CHUNK, dims] */
    float *values;  /* [CHUNK, dims] */
    float *weights; /* [CHUNK, TILE_ROWS] */
    float highest[TILE_ROWS], sum[TILE_ROWS], factor[TILE_ROWS];
    float whole_highest[TILE_ROWS], whole_sum[TILE_ROWS];
    float position[TILE_ROWS], lowest[TILE_ROWS]; /* exact below 2^24 */
    long dims;      /* the head's, padded to a multiple of 16 */
};

INLINE void fetch_chunk(const struct job_of_head *job, const struct tile *t, int64_t start, enum dtype dtype)
{
    long head_dim = job->a->head_dim;
    struct chunk chunk;
    locate(job, start, &chunk, dtype);
    for (int p = 0; p < CHUNK; p++) {
        const void *k = p < chunk.count ? chunk.keys[p] : NULL;
        const void *v = p < chunk.count ? at(k, keys_to_values(job->a), dtype) : NULL;
        for (long d = 0; d < t->dims; d += W) {
            int there = k != NULL && d < head_dim;
            vstore(t->keys + p * t->dims + d, there ? vload_cached(k, d, head_dim, dtype) : vset(0));
            vstore(t->values + p * t->dims + d, there ? vload_cached(v, d, head_dim, dtype) : vset(0));
        }
    }
}

static void score_tile(const struct tile *t, long head_dim)
{
    for (int p = 0; p < CHUNK; p += STRIP) {
        vf sums[STRIP][2];
        UNROLL for (int i = 0; i < STRIP; i++)
            sums[i][0] = sums[i][1] = vset(0);
        for (long d = 0; d < head_dim; d++) {
            vf q0 = vload(t->q + d * TILE_ROWS), q1 = vload(t->q + d * TILE_ROWS + W);
            UNROLL for (int i = 0; i < STRIP; i++) {
                vf k = vset(t->keys[(p + i) * t->dims + d]);
                sums[i][0] = vfma(q0, k, sums[i][0]);
                sums[i][1] = vfma(q1, k, sums[i][1]);
            }
        }
        UNROLL for (int i = 0; i < STRIP; i++) {
            vstore(t->weights + (p + i) * TILE_ROWS, sums[i][0]);
            vstore(t->weights + (p + i) * TILE_ROWS + W, sums[i][1]);
        }
    }
}

static void mask_tile(const struct tile *t, int64_t start)
{
    for (int p = 0; p < CHUNK; p++)
        for (int c = 0; c < TILE_ROWS; c += W) {
            vf here = vset((float)(start + p)), hidden = vset(-INFINITY);
            vf x = vload(t->weights + p * TILE_ROWS + c);
            x = vselect_less(vload(t->position + c), here, hidden, x);
            vstore(t->weights + p * TILE_ROWS + c, vselect_less(here, vload(t->lowest + c), hidden, x));
        }
}

static void weigh_tile(struct tile *t)
{
    for (int c = 0; c < TILE_ROWS; c += W) {
        vf before = vload(t->highest + c), now = before, others = before, sums[W];
        for (int p = 0; p < CHUNK; p += 2) {
            now = vmax(now, vload(t->weights + p * TILE_ROWS + c));
            others = vmax(others, vload(t->weights + (p + 1) * TILE_ROWS + c));
        }
        now = vmax(now, others);
        UNROLL for (int i = 0; i < W; i++)
            sums[i] = vset(0);
        for (int p = 0; p < CHUNK; p += W)
            UNROLL for (int i = 0; i < W; i++) {
                float *w = t->weights + (p + i) * TILE_ROWS + c;
                vf weight = vexp2(vsub(vload(w), now));
                vstore(w, weight);
                sums[i] = vadd(sums[i], weight);
            }
        UNROLL for (int half = W / 2; half > 0; half /= 2)
            UNROLL for (int i = 0; i < half; i++)
                sums[i] = vadd(sums[i], sums[i + half]);
        vf factor = vexp2(vsub(before, now));
        vstore(t->factor + c, factor);
        vstore(t->highest + c, now);
        vstore(t->sum + c, vfma(vload(t->sum + c), factor, sums[0]));
    }
}

static void gather_tile(const struct tile *t, int count)
{
    vf f0 = vload(t->factor), f1 = vload(t->factor + W);
    for (long d = 0; d < t->dims; d += STRIP) {
        vf sums[STRIP][2];
        UNROLL for (int i = 0; i < STRIP; i++) {
            sums[i][0] = vmul(vload(t->out + (d + i) * TILE_ROWS), f0);
            sums[i][1] = vmul(vload(t->out + (d + i) * TILE_ROWS + W), f1);
        }
        for (int p = 0; p < count; p++) {
            vf w0 = vload(t->weights + p * TILE_ROWS), w1 = vload(t->weights + p * TILE_ROWS + W);
            UNROLL for (int i = 0; i < STRIP; i++) {
                vf v = vset(t->values[p * t->dims + d + i]);
                sums[i][0] = vfma(w0, v, sums[i][0]);
                sums[i][1] = vfma(w1, v, sums[i][1]);
            }
        }
        UNROLL for (int i = 0; i < STRIP; i++) {
            vstore(t->out + (d + i) * TILE_ROWS, sums[i][0]);
            vstore(t->out + (d + i) * TILE_ROWS + W, sums[i][1]);
        }
    }
}

/* Rows to columns and back, W by W: dims beyond the head's are zero on the way in and dropped on the way out. */
static void load_tile_queries(const struct job_of_head *job, struct tile *t)
{
    const struct attention *a = job->a;
    for (int c = 0; c < TILE_ROWS; c += W)
        for (long d = 0; d < t->dims; d += W) {
            vf r[W];
            for (int i = 0; i < W; i++)
                r[i] = c + i < job->num_rows && d < a->head_dim
                           ? vmul(vload_at(head_of_row(job, &a->q, job->first_row + c + i), d, a->head_dim,
                                           (enum dtype)a->q.dtype), vset(query_scale(a)))
                           : vset(0);
            transpose(r);
            for (int i = 0; i < W; i++)
                vstore(t->q + (d + i) * TILE_ROWS + c, r[i]);
        }
    for (int i = 0; i < TILE_ROWS; i++) {
        int64_t position = position_of(job, job->first_row + min_int(i, job->num_rows - 1));
        t->position[i] = (float)position;
        t->lowest[i] = (float)lowest_position(job, position);
    }
}

static void begin_tile(float *out, float highest[TILE_ROWS], float sum[TILE_ROWS], long dims)
{
    memset(out, 0, sizeof(float) * (size_t)dims * TILE_ROWS);
    for (int i = 0; i < TILE_ROWS; i++) {
        highest[i] = LOWEST;
        sum[i] = 0;
    }
}

/* As add_split does, row by row in lanes. */
static void add_tile_split(struct tile *t)
{
    for (int c = 0; c < TILE_ROWS; c += W) {
        vf before = vload(t->whole_highest + c), here = vload(t->highest + c), now = vmax(before, here);
        vf keep = vexp2(vsub(before, now)), add = vexp2(vsub(here, now));
        vstore(t->whole_sum + c, vfma(vload(t->sum + c), add, vmul(vload(t->whole_sum + c), keep)));
        vstore(t->whole_highest + c, now);
        for (long d = 0; d < t->dims; d++) {
            float *whole = t->whole + d * TILE_ROWS + c;
            vstore(whole, vfma(vload(t->out + d * TILE_ROWS + c), add, vmul(vload(whole), keep)));
        }
    }
    begin_tile(t->out, t->highest, t->sum, t->dims);
}

static void store_tile(const struct job_of_head *job, const struct tile *t)
{
    const struct attention *a = job->a;
    for (int c = 0; c < TILE_ROWS; c += W)
        for (long d = 0; d < a->head_dim; d += W) {
            vf r[W];
            for (int i = 0; i < W; i++)
                r[i] = vdiv(without_minus(vload(t->whole + (d + i) * TILE_ROWS + c)), vload(t->whole_sum + c));
            transpose(r);
            for (int i = 0; i < W && c + i < job->num_rows; i++)
                vstore_at(head_of_row(job, &a->out, job->first_row + c + i), d, a->head_dim, r[i],
                          (enum dtype)a->out.dtype);
        }
}

static void attend_tile(const struct job_of_head *job)
{
    struct tile t;
    t.dims = (long)round_up(job->a->head_dim, 16);
    t.q = scratch(SCRATCH_TILE, sizeof(float) * (size_t)(t.dims * (3 * TILE_ROWS + 2 * CHUNK) + CHUNK * TILE_ROWS));
    t.out = t.q + t.dims * TILE_ROWS;
    t.whole = t.out + t.dims * TILE_ROWS;
    t.keys = t.whole + t.dims * TILE_ROWS;
    t.values = t.keys + t.dims * CHUNK;
    t.weights = t.values + t.dims * CHUNK;
    load_tile_queries(job, &t);
    begin_tile(t.out, t.highest, t.sum, t.dims);
    begin_tile(t.whole, t.whole_highest, t.whole_sum, t.dims);
    int64_t first = position_of(job, job->first_row), last = position_of(job, job->first_row + job->num_rows - 1);
    for (int64_t start = job->start; start < job->end; start += CHUNK) {
        int count = (int)min_int(CHUNK, job->end - start);
        FOR_CACHE_DTYPE(job->a->cache_dtype, fetch_chunk(job, &t, start, dtype));
        score_tile(&t, job->a->head_dim);
        if (start + CHUNK - 1 > first || start < lowest_position(job, last))
            mask_tile(&t, start);
        weigh_tile(&t);
        gather_tile(&t, count);
        if (ends_split(job, start))
            add_tile_split(&t);
    }
    store_tile(job, &t);
}

/* ---- sharing out ---- */

INLINE bool multiplies_bf16(const struct attention *a)
{
#if defined(ISA_BF16)
    return a->cache_dtype == BF16 || (a->cache_dtype == I8 && a->q.dtype == BF16);
#else
    (void)a;
    return false;
#endif
}

/* Rows of one sequence and key/value head that are computed together: the more, the less often keys and values are read,
 * but threads should end at about the same time. */
INLINE int64_t rows_at_once(const struct attention *a, int64_t num_rows)
{
    if (multiplies_bf16(a))
        return num_rows <= 512 ? 64 : num_rows <= 2048 ? 128 : 256;
    return num_rows <= MAX_FEW_ROWS ? MAX_FEW_ROWS : TILE_ROWS;
}

static int64_t rows_of(const struct attention *a, int64_t sequence)
{
    return (int64_t)(a->query_starts[sequence + 1] - a->query_starts[sequence]) * (a->num_heads / a->num_kv_heads);
}

/* What the threads share out: pieces of sequences' heads, some rows of them or some positions. */
struct shares {
    const struct attention *a;
    int64_t longest;      /* context of a handful of rows that one thread takes whole */
    int64_t *first_piece; /* of each sequence, and behind the last one their number */
    char *parts;          /* of every piece, as far as it is a split */
    size_t part_bytes;
    _Atomic int64_t *missing; /* splits of each sequence's heads */
};

static struct job_of_head whole_head(const struct attention *a, int64_t sequence, int kv_head)
{
    struct job_of_head job = {.a = a, .sequence = sequence, .kv_head = kv_head};
    job.table = a->block_tables + sequence * a->table_stride;
    job.group = a->num_heads / a->num_kv_heads;
    job.query_start = a->query_starts[sequence];
    job.num_queries = a->query_starts[sequence + 1] - job.query_start;
    job.num_rows = rows_of(a, sequence);
    job.context_len = job.end = a->context_lens[sequence];
    return job;
}

/* The first position that any row of the job sees. */
static int64_t first_position(const struct job_of_head *job)
{
    return lowest_position(job, position_of(job, job->first_row));
}

static int64_t count_splits(const struct attention *a, int64_t sequence)
{
    struct job_of_head job = whole_head(a, sequence, 0);
    return (job.end - 1) / SPLIT - first_position(&job) / SPLIT + 1;
}

INLINE int64_t most_rows_of_split(const struct attention *a)
{
    return multiplies_bf16(a) ? MOST_SUMS : MAX_FEW_ROWS;
}

/* A handful of rows reads all their context, while others may have nothing to do. */
static int is_split(const struct shares *shares, int64_t sequence)
{
    const struct attention *a = shares->a;
    int64_t rows = rows_of(a, sequence);
    return rows > 0 && rows <= most_rows_of_split(a) && a->context_lens[sequence] > shares->longest &&
           count_splits(a, sequence) > 1;
}

/* Of each head of the sequence. */
static int64_t pieces_of(const struct shares *shares, int64_t sequence)
{
    if (is_split(shares, sequence))
        return count_splits(shares->a, sequence);
    int64_t rows = rows_of(shares->a, sequence), at_once = rows_at_once(shares->a, rows);
    return (rows + at_once - 1) / at_once;
}

static struct row_sums *part_of(const struct shares *shares, int64_t piece)
{
    return (struct row_sums *)(shares->parts + (size_t)piece * shares->part_bytes);
}

static void join_few(const struct job_of_head *job, const struct shares *shares, int64_t first, int64_t count)
{
    struct few f;
    lay_out_few(job, &f);
    for (int64_t i = first; i < first + count; i++)
        add_few_split(job, &f, part_of(shares, i));
    store_few(job, &f);
}

#if defined(ISA_BF16)
#include "bf16_attention.c"
#endif

/* `next`, or null, is about what this thread will take after it. */
static void attend(const struct job_of_head *job, const struct job_of_head *next)
{
#if defined(ISA_BF16)
    if (multiplies_bf16(job->a)) {
        attend_tiles(job, next);
        return;
    }
#else
    (void)next;
#endif
    if (job->num_rows <= MAX_FEW_ROWS)
        attend_few(job);
    else
        attend_tile(job);
}

static struct job_of_head job_of(const struct shares *shares, int64_t piece)
{
    const struct attention *a = shares->a;
    int64_t sequence = 0;
    while (piece >= shares->first_piece[sequence + 1])
        sequence++;
    int64_t index = piece - shares->first_piece[sequence];
    int64_t pieces = (shares->first_piece[sequence + 1] - shares->first_piece[sequence]) / a->num_kv_heads;
    struct job_of_head job = whole_head(a, sequence, (int)(index / pieces));
    if (is_split(shares, sequence)) {
        int64_t first = first_position(&job) / CHUNK * CHUNK, start = (first / SPLIT + index % pieces) * SPLIT;
        job.start = start > first ? start : first;
        job.end = min_int(start + SPLIT, job.context_len);
        job.part = part_of(shares, piece);
        return job;
    }
    int64_t rows = job.num_rows, at_once = rows_at_once(a, rows);
    job.first_row = (pieces - 1 - index % pieces) * at_once; /* the longest first: threads end together */
    job.num_rows = min_int(at_once, rows - job.first_row);
    job.start = first_position(&job) / CHUNK * CHUNK;
    job.end = position_of(&job, job.first_row + job.num_rows - 1) + 1;
    return job;
}

/* Whoever computed the last split of a head adds them all up. */
static void join_parts(const struct shares *shares, const struct job_of_head *split)
{
    const struct attention *a = shares->a;
    if (atomic_fetch_sub(&shares->missing[split->sequence * a->num_kv_heads + split->kv_head], 1) > 1)
        return;
    struct job_of_head job = whole_head(a, split->sequence, split->kv_head);
    int64_t count = count_splits(a, job.sequence), first = shares->first_piece[job.sequence] + job.kv_head * count;
#if defined(ISA_BF16)
    if (multiplies_bf16(a)) {
        join_tiles(&job, shares, first, count);
        return;
    }
#endif
    join_few(&job, shares, first, count);
}

static void attend_piece(void *context, int64_t piece)
{
    const struct shares *shares = context;
    struct job_of_head job = job_of(shares, piece), next;
    int64_t then = piece + num_threads();
    bool more = multiplies_bf16(shares->a) && then < shares->first_piece[shares->a->num_sequences];
    if (more)
        next = job_of(shares, then);
    attend(&job, more ? &next : NULL);
    if (job.part != NULL)
        join_parts(shares, &job);
}

static void make_room_for_parts(struct shares *shares, int64_t num_pieces)
{
    const struct attention *a = shares->a;
    size_t dims = (size_t)round_up(a->head_dim, 32), num_heads = (size_t)(a->num_sequences * a->num_kv_heads);
    size_t counters = (num_heads * sizeof *shares->missing + 63) & ~(size_t)63;
    shares->part_bytes = sizeof(struct row_sums) + sizeof(float) * dims * (size_t)most_rows_of_split(a);
    char *memory = scratch(SCRATCH_PARTS, counters + (size_t)num_pieces * shares->part_bytes);
    shares->missing = (_Atomic int64_t *)memory;
    shares->parts = memory + counters;
    for (size_t i = 0; i < num_heads; i++)
        atomic_store(&shares->missing[i], count_splits(a, (int64_t)i / a->num_kv_heads));
}

static void attention(const struct attention *a)
{
    struct shares shares = {.a = a};
    int64_t total = 0, num_split = 0, count = 0;
    for (int64_t s = 0; s < a->num_sequences; s++)
        total += a->context_lens[s] * a->num_kv_heads;
    shares.longest = num_threads() > 1 ? total / (4 * num_threads()) : INT64_MAX;
    shares.first_piece = scratch(SCRATCH_SHARES, (size_t)(a->num_sequences + 1) * sizeof(int64_t));
    for (int64_t s = 0; s < a->num_sequences; s++) {
        shares.first_piece[s] = count;
        count += pieces_of(&shares, s) * a->num_kv_heads;
        num_split += is_split(&shares, s);
    }
    shares.first_piece[a->num_sequences] = count;
    if (num_split > 0)
        make_room_for_parts(&shares, count);
    parallel(count, attend_piece, &shares);
}
