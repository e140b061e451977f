/* The products of bf16_attention.c in AMX tiles. */

static void begin_products(const struct head_tiles *h)
{
    memset(h->weights, 0, sizeof(uint16_t) * 16 * CHUNK); /* of rows that nobody computes */
    configure_tiles(16, 16);
}

static void end_products(void)
{
    TILE_RELEASE();
}

/* scores[CHUNK][16 rows] of `count` positions, in whole tiles; of tiles of keys beyond them the first is read. */
static void score_rows16(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile,
                         const struct chunk *chunk, int count, struct positions_ahead *ahead)
{
    long stride = (h->in_place ? job->a->head_dim : h->dims) * 2;
    const uint16_t *keys[CHUNK / 16];
    for (int i = 0; i < CHUNK / 16; i++) {
        int p = 16 * i < count ? 16 * i : 0;
        keys[i] = h->in_place ? (const uint16_t *)chunk->keys[p] : h->keys + p * h->dims;
    }
    zero_results();
    for (long d = 0; d < h->dims; d += 32) {
        TILE_LOAD(6, tile->q + d * 16, 64);
        TILE_LOAD(4, keys[0] + d, stride);
        TILE_MULTIPLY(0, 4, 6);
        fetch_positions(ahead, 2);
        TILE_LOAD(5, keys[1] + d, stride);
        TILE_MULTIPLY(1, 5, 6);
        fetch_positions(ahead, 2);
        TILE_LOAD(4, keys[2] + d, stride);
        TILE_MULTIPLY(2, 4, 6);
        fetch_positions(ahead, 2);
        TILE_LOAD(5, keys[3] + d, stride);
        TILE_MULTIPLY(3, 5, 6);
        fetch_positions(ahead, 2);
    }
    TILE_STORE(0, h->scores, 64);
    TILE_STORE(1, h->scores + 256, 64);
    TILE_STORE(2, h->scores + 512, 64);
    TILE_STORE(3, h->scores + 768, 64);
}

INLINE vf load_4positions(const float *scores)
{
    vf x = _mm512_castps128_ps512(_mm_load_ps(scores));
    x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_load_ps(scores + 16));
    x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_load_ps(scores + 32));
    return _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_load_ps(scores + 48));
}

static void score_4rows(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile,
                        const struct chunk *chunk, struct positions_ahead *ahead, vf scores[CHUNK / 4])
{
    score_rows16(job, h, tile, chunk, chunk->count, ahead);
    UNROLL for (int i = 0; i < CHUNK / 4; i++)
        scores[i] = load_4positions(h->scores + i * 64);
}

static void gather_rows16(const struct head_tiles *h, const struct rows16 *tile, int count, struct positions_ahead *ahead)
{
    long stride = h->dims * 4;
    const uint16_t *low = h->values, *high = h->values + HALF * h->dims; /* the first and the last 16 pairs */
    TILE_LOAD(4, h->weights, CHUNK * 2);
    TILE_LOAD(5, h->weights + HALF, CHUNK * 2);
    for (long d = 0; d < h->dims; d += 32) {
        TILE_LOAD(0, tile->split.out + d, stride);
        TILE_LOAD(6, low + d * 2, stride);
        TILE_MULTIPLY(0, 4, 6);
        fetch_positions(ahead, 2);
        TILE_LOAD(1, tile->split.out + d + 16, stride);
        TILE_LOAD(7, low + (d + 16) * 2, stride);
        TILE_MULTIPLY(1, 4, 7);
        fetch_positions(ahead, 2);
        if (count > HALF) {
            TILE_LOAD(6, high + d * 2, stride);
            TILE_MULTIPLY(0, 5, 6);
            fetch_positions(ahead, 2);
            TILE_LOAD(7, high + (d + 16) * 2, stride);
            TILE_MULTIPLY(1, 5, 7);
            fetch_positions(ahead, 2);
        }
        TILE_STORE(0, tile->split.out + d, stride);
        TILE_STORE(1, tile->split.out + d + 16, stride);
    }
}

/* Values always pass through fetch_values. */
INLINE bool gathers_in_place(const struct job_of_head *job, const struct head_tiles *h)
{
    (void)job;
    (void)h;
    return false;
}

/* All 16 rows, which cost no more. */
static void gather_4rows(const struct job_of_head *job, const struct head_tiles *h, const struct rows16 *tile,
                         const struct chunk *chunk, struct positions_ahead *ahead)
{
    (void)job;
    gather_rows16(h, tile, chunk->count, ahead);
}
