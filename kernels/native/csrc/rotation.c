/* Rows turned so that no input stands out (the transform of Walsh and Hadamard): of activations some are many times as
 * large as all others, and a scale that fits those leaves few whole numbers for the others. Turned as activations are,
 * weights give the same products. */

enum { SPAN_VECTORS = SPAN / W };

/* x[n], n a multiple of SPAN: every run of as many as the largest power of two in n is turned, which makes it longer by the
 * square root of that. */
INLINE void turn(float *x, int64_t n)
{
    for (int64_t start = 0; start < n; start += SPAN) {
        vf v[SPAN_VECTORS];
        UNROLL for (int i = 0; i < SPAN_VECTORS; i++)
            v[i] = vload(x + start + i * W);
        UNROLL for (int apart = 1; apart < SPAN_VECTORS; apart *= 2)
            UNROLL for (int i = 0; i < SPAN_VECTORS; i++)
                if ((i & apart) == 0) {
                    vf a = v[i], b = v[i + apart];
                    v[i] = vadd(a, b);
                    v[i + apart] = vsub(a, b);
                }
        UNROLL for (int i = 0; i < SPAN_VECTORS; i++)
            vstore(x + start + i * W, vturn(v[i]));
    }
    for (int64_t apart = SPAN; n % (2 * apart) == 0; apart *= 2)
        for (int64_t start = 0; start < n; start += 2 * apart)
            for (int64_t i = start; i < start + apart; i += W) {
                vf a = vload(x + i), b = vload(x + i + apart);
                vstore(x + i, vadd(a, b));
                vstore(x + i + apart, vsub(a, b));
            }
}

/* What a row times its turned self has become longer by. */
INLINE float turned_length(int64_t n)
{
    return (float)(n & -n);
}

/* Some inputs of a turned row as whole numbers: x = scale * number. */
struct rounded {
    float scale;    /* NaN if one is not finite: whole numbers could not show it */
    int32_t offset; /* what WEIGHT_OFFSET adds to their products, to be taken away */
};

/* `count`: a multiple of SPAN */
INLINE struct rounded round_group(const float *x, int64_t count, int8_t *whole)
{
    vf highest = vset(0), spoilt = vset(0);
    for (int64_t i = 0; i < count; i += W) {
        highest = vmax(highest, vabs(vload(x + i)));
        spoilt = vfma(vload(x + i), vset(0), spoilt);
    }
    float most = vhighest(highest);
    vf inverse = vset(most > 0 ? 127.0f / most : 0.0f);
    for (int64_t i = 0; i < count; i += W)
        vstore_int8(whole + i, vmul(vload(x + i), inverse));
    struct rounded rounded = {(most + vsum(spoilt)) / 127.0f, 0};
    if (WEIGHT_OFFSET != 0) {
        wholes sums = all_wholes(0);
        for (int64_t i = 0; i < count; i += 4 * W)
            sums = dot4(sums, load_wholes(whole + i), all_wholes(0x01010101));
        rounded.offset = -WEIGHT_OFFSET * (int32_t)vsum(as_floats(sums));
    }
    return rounded;
}
