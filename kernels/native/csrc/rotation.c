/* Rows turned so that no input stands out (the transform of Walsh and Hadamard): of activations some are many times as
 * large as all others, and a scale that fits those leaves few whole numbers for the others. Turned as activations are,
 * weights give the same products. Half of all signs are changed before, or what all inputs have in common would stand out
 * afterwards. */

enum { SPAN_VECTORS = SPAN / W };

/* By input, repeated: drawn at random, the least significant bit of 32 first. */
static const uint32_t flips[] = {0x3c6da5d7, 0x4da4f9fc, 0x1a6916c7, 0xb8a1abcd, 0x656412a9, 0x7a97c643, 0x27ac435a, 0x1710cf53,
                                 0x11072231, 0x0512bd13, 0x66ceab36, 0x8ca59966, 0xeaff1a09, 0x4a14876a, 0xccea71ff, 0xfd724452};

INLINE uint32_t flips_from(int64_t input)
{
    return flips[input / 32 % 16] >> input % 32;
}

/* x[n], n a multiple of SPAN: every run of as many as the largest power of two in n is turned, which makes it longer by the
 * square root of that. */
INLINE void turn(float *x, int64_t n)
{
    for (int64_t start = 0; start < n; start += SPAN) {
        vf v[SPAN_VECTORS];
        UNROLL for (int i = 0; i < SPAN_VECTORS; i++)
            v[i] = vflip(vload(x + start + i * W), flips_from(start + i * W));
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
    vf inverse = vset(steps_per_unit(most));
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
