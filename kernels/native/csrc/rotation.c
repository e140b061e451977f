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

/* Sums and differences of vectors 1, 2, 4, ... places apart in turn. */
INLINE void turn_vectors(vf *v, const int count)
{
    UNROLL for (int apart = 1; apart < count; apart *= 2)
        UNROLL for (int i = 0; i < count; i++)
            if ((i & apart) == 0) {
                vf a = v[i], b = v[i + apart];
                v[i] = vadd(a, b);
                v[i + apart] = vsub(a, b);
            }
}

/* Of `count` runs of `apart` numbers each, one behind the other, through as many stages as registers hold. */
INLINE void turn_runs(float *x, int64_t n, int64_t apart, const int count)
{
    for (int64_t start = 0; start < n; start += count * apart)
        for (int64_t i = start; i < start + apart; i += W) {
            vf v[8];
            UNROLL for (int k = 0; k < count; k++)
                v[k] = vload(x + i + k * apart);
            turn_vectors(v, count);
            UNROLL for (int k = 0; k < count; k++)
                vstore(x + i + k * apart, v[k]);
        }
}

/* n numbers of a type to x[padded], a multiple of SPAN, zeros behind them: every run of as many as the largest power of two
 * in it is turned, which makes it longer by the square root of that. */
INLINE void turn(const void *from, enum dtype dtype, int64_t n, float *x, int64_t padded)
{
    for (int64_t start = 0; start < padded; start += SPAN) {
        vf v[SPAN_VECTORS];
        UNROLL for (int i = 0; i < SPAN_VECTORS; i++) {
            int64_t input = start + i * W;
            v[i] = input < n ? vflip(vload_at(from, (long)input, (long)n, dtype), flips_from(input)) : vset(0);
        }
        turn_vectors(v, SPAN_VECTORS);
        UNROLL for (int i = 0; i < SPAN_VECTORS; i++)
            vstore(x + start + i * W, vturn(v[i]));
    }
    for (int64_t apart = SPAN; padded % (2 * apart) == 0;)
        if (padded % (8 * apart) == 0) {
            turn_runs(x, padded, apart, 8);
            apart *= 8;
        } else if (padded % (4 * apart) == 0) {
            turn_runs(x, padded, apart, 4);
            apart *= 4;
        } else {
            turn_runs(x, padded, apart, 2);
            apart *= 2;
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
    vf highest = vset(0);
    for (int64_t i = 0; i < count; i += W)
        highest = vmax_magnitude(highest, vload(x + i));
    float most = vhighest_magnitude(highest);
    vf inverse = vset(steps_per_unit(most));
    wholes sums = all_wholes(0);
    for (int64_t i = 0; i < count; i += 4 * W) {
        vf scaled[4];
        UNROLL for (int k = 0; k < 4; k++)
            scaled[k] = vmul(vload(x + i + k * W), inverse);
        wholes rounded = to_wholes(scaled);
        store_wholes(whole + i, rounded);
        if (WEIGHT_OFFSET != 0)
            sums = dot4(sums, rounded, all_wholes(0x01010101));
    }
    return (struct rounded){scale_of(most), -WEIGHT_OFFSET * (int32_t)vsum(as_floats(sums))};
}
