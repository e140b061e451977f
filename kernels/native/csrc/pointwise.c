/* Norms, rotary embedding, activation and the store into the cache: memory-bound passes over rows. */

enum { ROWS_PER_ITEM = 16 }; /* rows that one thread takes at a time */

/* `dtype` is that of the rows, as a constant where many numbers are taken. */
INLINE void *row_as(const struct rows *x, int64_t row, enum dtype dtype)
{
    return at_mut(x->data, (size_t)(row * x->stride), dtype);
}

INLINE void *row_of(const struct rows *x, int64_t row)
{
    return row_as(x, row, (enum dtype)x->dtype);
}

INLINE vf load_row(const struct rows *x, int64_t row, long i, long n)
{
    return vload_at(row_of(x, row), i, n, (enum dtype)x->dtype);
}

INLINE void store_row(const struct rows *x, int64_t row, long i, long n, vf value)
{
    vstore_at(row_of(x, row), i, n, value, (enum dtype)x->dtype);
}

INLINE vf as_stored(vf x, enum dtype dtype)
{
    uint32_t stored[W];
    if (dtype == F32)
        return x;
    vstore_any(stored, x, dtype);
    return vload_any(stored, dtype);
}

struct norm_job {
    struct rows x, residual, out, sum; /* residual and sum may be absent: data null; the sum has the type of x */
    const void *weight;                /* of the type of out */
    float eps;
    int64_t num_rows, width;
};

/* The residual sum is rounded to its type before it is normed: that is what the next layer will read. */
INLINE vf norm_input(const void *x, const void *residual, long i, long n, enum dtype dtype)
{
    vf value = vload_at(x, i, n, dtype);
    return residual == NULL ? value : as_stored(vadd(value, vload_at(residual, i, n, dtype)), dtype);
}

INLINE void norm_row(const struct norm_job *job, int64_t row, enum dtype from, enum dtype to)
{
    const void *x = row_of(&job->x, row), *residual = job->residual.data ? row_of(&job->residual, row) : NULL;
    void *out = row_of(&job->out, row), *sum = job->sum.data ? row_of(&job->sum, row) : NULL;
    long n = (long)job->width;
    vf squares = vset(0);
    for (long i = 0; i < n; i += W) {
        vf value = norm_input(x, residual, i, n, from);
        squares = vfma(value, value, squares);
    }
    vf scale = vset(1.0f / sqrtf(vsum(squares) / (float)n + job->eps));
    for (long i = 0; i < n; i += W) {
        vf value = norm_input(x, residual, i, n, from), normed = vmul(value, scale);
        if (sum != NULL)
            vstore_at(sum, i, n, value, from);
        if (from == to) /* as the specification does; from float32, one rounding is enough */
            normed = as_stored(normed, to);
        vstore_at(out, i, n, vmul(normed, vload_at(job->weight, i, n, to)), to);
    }
}

static void norm_rows(void *context, int64_t item)
{
    const struct norm_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++) {
        if (job->x.dtype == F32)
            FOR_DTYPE(job->out.dtype, norm_row(job, row, F32, dtype));
        else
            FOR_DTYPE(job->out.dtype, norm_row(job, row, dtype, dtype));
    }
}

static int64_t row_items(int64_t num_rows)
{
    return (num_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
}

/* x has the type of out or is float32; residual and sum have that of x. */
static void rms_norm(const struct rows *x, const struct rows *residual, const void *weight, float eps, int64_t num_rows,
                     int64_t width, const struct rows *out, const struct rows *sum)
{
    struct norm_job job = {*x, *residual, *out, *sum, weight, eps, num_rows, width};
    parallel(row_items(num_rows), norm_rows, &job);
}

struct rotary_job {
    struct rows x, out;
    const int64_t *positions;
    const float *cos_sin;
    int64_t num_rows;
    int num_heads, head_dim;
};

INLINE void rotate_row(const struct rotary_job *job, int64_t row, enum dtype dtype)
{
    long half = job->head_dim / 2;
    const float *cosines = job->cos_sin + job->positions[row] * job->head_dim, *sines = cosines + half;
    for (int head = 0; head < job->num_heads; head++) {
        const void *x = at(row_of(&job->x, row), (size_t)head * job->head_dim, dtype);
        void *out = at_mut(row_of(&job->out, row), (size_t)head * job->head_dim, dtype);
        for (long i = 0; i < half; i += W) {
            vf first = vload_at(x, i, half, dtype), second = vload_at(at(x, (size_t)half, dtype), i, half, dtype);
            vf c = vload_at(cosines, i, half, F32), s = vload_at(sines, i, half, F32);
            vstore_at(out, i, half, vsub(vmul(first, c), vmul(second, s)), dtype);
            vstore_at(at_mut(out, (size_t)half, dtype), i, half, vadd(vmul(second, c), vmul(first, s)), dtype);
        }
    }
}

static void rotate_rows(void *context, int64_t item)
{
    const struct rotary_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        FOR_DTYPE(job->x.dtype, rotate_row(job, row, dtype));
}

static void rotary(const struct rows *x, const struct rows *out, const int64_t *positions, const float *cos_sin,
                   int64_t num_rows, int num_heads, int head_dim)
{
    struct rotary_job job = {*x, *out, positions, cos_sin, num_rows, num_heads, head_dim};
    parallel(row_items(num_rows), rotate_rows, &job);
}

struct silu_job {
    struct rows gate_up, out;
    int64_t num_rows, width;
};

INLINE vf silu(vf x)
{
    vf e = vexp2(vmul(x, vset(-0x1.715476p0f))); /* x / (1 + e^-x) */
    return vmul(x, vreciprocal(vadd(vset(1.0f), e)));
}

INLINE void silu_row(const struct silu_job *job, int64_t row, enum dtype dtype)
{
    const void *gate = row_of(&job->gate_up, row), *up = at(gate, (size_t)job->width, dtype);
    void *out = row_of(&job->out, row);
    for (long i = 0; i < job->width; i += W) {
        vf activated = as_stored(silu(vload_at(gate, i, job->width, dtype)), dtype);
        vstore_at(out, i, job->width, vmul(activated, vload_at(up, i, job->width, dtype)), dtype);
    }
}

static void silu_rows(void *context, int64_t item)
{
    const struct silu_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        FOR_DTYPE(job->out.dtype, silu_row(job, row, dtype));
}

static void silu_mul(const struct rows *gate_up, const struct rows *out, int64_t num_rows, int64_t width)
{
    struct silu_job job = {*gate_up, *out, num_rows, width};
    parallel(row_items(num_rows), silu_rows, &job);
}

/* A head's numbers as whole ones, the largest magnitude 127, and their scale. What is not finite makes the scale NaN. */
INLINE void store_whole(const void *x, enum dtype from, int8_t *row, long head_dim)
{
    vf highest = vset(0);
    for (long i = 0; i < head_dim; i += W)
        highest = vmax_magnitude(highest, vload_at(x, i, head_dim, from));
    float most = vhighest_magnitude(highest), scale = scale_of(most);
    vf inverse = vset(most > 0 ? 127.0f / most : 0.0f);
    for (long i = 0; i < head_dim; i += W) {
        int8_t whole[W];
        vstore_int8(whole, vmul(vload_at(x, i, head_dim, from), inverse));
        memcpy(row + i, whole, (size_t)(head_dim - i < W ? head_dim - i : W));
    }
    memcpy(row + head_dim, &scale, sizeof scale);
}

static void store_one(const struct rows *from, int64_t row, void *to, enum dtype dtype, int num_kv_heads, int block_size,
                      int head_dim)
{
    size_t head_size = (size_t)(block_size * row_width(head_dim, dtype));
    for (int head = 0; head < num_kv_heads; head++) {
        const void *x = at(row_of(from, row), (size_t)head * head_dim, (enum dtype)from->dtype);
        void *place = at_mut(to, (size_t)head * head_size, dtype);
        if (dtype == I8)
            store_whole(x, (enum dtype)from->dtype, place, head_dim);
        for (long i = 0; dtype != I8 && i < head_dim; i += W)
            vstore_at(place, i, head_dim, vload_at(x, i, head_dim, (enum dtype)from->dtype), dtype);
    }
}

struct store_job {
    struct rows k, v;
    void *cache;
    int64_t cache_stride;
    enum dtype dtype;
    const int64_t *slots;
    int64_t num_rows;
    int num_kv_heads, block_size, head_dim;
};

static void store_rows(void *context, int64_t item)
{
    const struct store_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    int64_t width = row_width(job->head_dim, job->dtype);
    size_t values = (size_t)(job->num_kv_heads * job->block_size * width);
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++) {
        int64_t block = job->slots[row] / job->block_size, offset = job->slots[row] % job->block_size;
        void *keys = at_mut(job->cache, (size_t)(block * job->cache_stride + offset * width), job->dtype);
        store_one(&job->k, row, keys, job->dtype, job->num_kv_heads, job->block_size, job->head_dim);
        keys = at_mut(keys, values, job->dtype);
        store_one(&job->v, row, keys, job->dtype, job->num_kv_heads, job->block_size, job->head_dim);
    }
}

static void store_kv(const struct rows *k, const struct rows *v, void *cache, int64_t cache_stride, int cache_dtype,
                     const int64_t *slots, int64_t num_rows, int num_kv_heads, int block_size, int head_dim)
{
    struct store_job job = {*k, *v, cache, cache_stride, (enum dtype)cache_dtype, slots, num_rows, num_kv_heads,
                            block_size, head_dim};
    parallel(row_items(num_rows), store_rows, &job);
}

struct embed_job {
    const void *table;
    enum dtype dtype;
    const int64_t *token_ids;
    int64_t num_rows, width;
    struct rows out;
};

static void embed_rows(void *context, int64_t item)
{
    const struct embed_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++) {
        const void *x = at(job->table, (size_t)(job->token_ids[row] * job->width), job->dtype);
        for (long i = 0; i < job->width; i += W)
            store_row(&job->out, row, i, job->width, vload_at(x, i, job->width, job->dtype));
    }
}

static void embed(const void *table, int dtype, const int64_t *token_ids, int64_t num_rows, int64_t width,
                  const struct rows *out)
{
    struct embed_job job = {table, (enum dtype)dtype, token_ids, num_rows, width, *out};
    parallel(row_items(num_rows), embed_rows, &job);
}

struct convert_job {
    struct rows x, out;
    int64_t num_rows, width;
};

static void convert_rows(void *context, int64_t item)
{
    const struct convert_job *job = context;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t row = item * ROWS_PER_ITEM; row < end && row < job->num_rows; row++)
        for (long i = 0; i < job->width; i += W)
            store_row(&job->out, row, i, job->width, load_row(&job->x, row, i, job->width));
}

/* x in the type of out */
static void convert(const struct rows *x, int64_t num_rows, int64_t width, const struct rows *out)
{
    struct convert_job job = {*x, *out, num_rows, width};
    parallel(row_items(num_rows), convert_rows, &job);
}
