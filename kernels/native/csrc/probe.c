/* What this core could do at best: the floors that measured times are set against. */

/* Reads memory as fast as plain loads can; returns something that depends on all of it. */
static float probe_read(const void *data, int64_t bytes)
{
    const float *x = data;
    vf highest[8];
    UNROLL for (int i = 0; i < 8; i++)
        highest[i] = vset(0);
    for (int64_t n = 0; n + 8 * W <= bytes / 4; n += 8 * W)
        UNROLL for (int i = 0; i < 8; i++)
            highest[i] = vmax(vload(x + n + i * W), highest[i]);
    UNROLL for (int i = 1; i < 8; i++)
        highest[0] = vmax(highest[0], highest[i]);
    return vhighest(highest[0]);
}

/* Multiplies and adds in registers; returns the number of operations done. */
static int64_t probe_floats(int64_t rounds)
{
    enum { CHAINS = W == 4 ? 10 : 12 };
    vf sums[CHAINS], x = vset(0.5f), y = vset(1.0f);
    UNROLL for (int i = 0; i < CHAINS; i++)
        sums[i] = vset((float)i);
    for (int64_t n = 0; n < rounds; n++)
        UNROLL for (int i = 0; i < CHAINS; i++)
            sums[i] = vfma(sums[i], x, y);
    UNROLL for (int i = 1; i < CHAINS; i++)
        sums[0] = vadd(sums[0], sums[i]);
    volatile float used = vsum(sums[0]); /* or nothing above would be computed */
    (void)used;
    return rounds * CHAINS * W * 2;
}

/* The same in bf16, where there are units for it; 0 where there are none. */
static int64_t probe_bf16(int64_t rounds)
{
#if defined(ISA_AMX)
    configure_tiles(16, 16);
    for (int64_t n = 0; n < rounds; n++) {
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 4, 7);
        TILE_MULTIPLY(2, 5, 6);
        TILE_MULTIPLY(3, 5, 7);
    }
    TILE_RELEASE();
    return rounds * 4 * 16 * 16 * 32 * 2;
#elif defined(ISA_BF16)
    __m512bh x = (__m512bh)_mm512_setzero_si512();
    vf sums[12];
    UNROLL for (int i = 0; i < 12; i++)
        sums[i] = vset((float)i);
    for (int64_t n = 0; n < rounds; n++)
        UNROLL for (int i = 0; i < 12; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], x, x);
    UNROLL for (int i = 1; i < 12; i++)
        sums[0] = vadd(sums[0], sums[i]);
    volatile float used = vsum(sums[0]);
    (void)used;
    return rounds * 12 * W * 2 * 2;
#else
    (void)rounds;
    return 0;
#endif
}
