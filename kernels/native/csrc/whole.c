/* Whole numbers: four of a row's activations times those of W outputs' weights, summed exactly. */

#if defined(ISA_AVX512) && !defined(ISA_AMX)
enum { WEIGHT_OFFSET = 128 }; /* vpdpbusd multiplies unsigned by signed */
#else
enum { WEIGHT_OFFSET = 0 };
#endif

#if defined(ISA_AVX512)
typedef int32_t wholes __attribute__((vector_size(64)));
INLINE wholes load_wholes(const void *p) { return (wholes)_mm512_loadu_si512(p); }
INLINE wholes all_wholes(int32_t x) { return (wholes)_mm512_set1_epi32(x); }
INLINE wholes dot4(wholes sums, wholes x, wholes w) { return (wholes)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x); }
INLINE vf as_floats(wholes x) { return _mm512_cvtepi32_ps((__m512i)x); }
INLINE wholes to_wholes(const vf x[4])
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    return (wholes)_mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}
#elif defined(ISA_AVX2)
typedef int32_t wholes __attribute__((vector_size(32)));
INLINE wholes load_wholes(const void *p) { return (wholes)_mm256_loadu_si256((const __m256i *)p); }
INLINE wholes all_wholes(int32_t x) { return (wholes)_mm256_set1_epi32(x); }
INLINE wholes add_pairs(wholes sums, __m256i pairs)
{
    return (wholes)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* |x| times w with the sign of x: pairs stay within 2 * 127 * 127, so that nothing saturates. */
INLINE wholes dot4(wholes sums, wholes x, wholes w)
{
    return add_pairs(sums, _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)x), _mm256_sign_epi8((__m256i)w, (__m256i)x)));
}
INLINE vf as_floats(wholes x) { return _mm256_cvtepi32_ps((__m256i)x); }
INLINE wholes to_wholes(const vf x[4])
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
    __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2]), _mm256_cvtps_epi32(x[3]));
    return (wholes)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}
#else
typedef vi wholes;
INLINE wholes load_wholes(const void *p)
{
    wholes x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE wholes all_wholes(int32_t x) { return (wholes){x, x, x, x}; }
INLINE wholes dot4(wholes sums, wholes x, wholes w)
{
    int8_t a[4 * W], b[4 * W];
    memcpy(a, &x, sizeof a);
    memcpy(b, &w, sizeof b);
    for (int i = 0; i < W; i++)
        sums[i] += a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] + a[4 * i + 3] * b[4 * i + 3];
    return sums;
}
INLINE vf as_floats(wholes x) { return __builtin_convertvector(x, vf); }
INLINE wholes to_wholes(const vf x[4])
{
    int8_t bytes[4 * W];
    for (int i = 0; i < 4; i++)
        vstore_int8(bytes + i * W, x[i]);
    return load_wholes(bytes);
}
#endif

INLINE void store_wholes(int8_t *p, wholes x)
{
    memcpy(p, &x, sizeof x);
}

/* What makes the largest magnitude 127; of numbers too small for that, next to nothing, it makes 0. */
INLINE float steps_per_unit(float most)
{
    return most > 1e-36f ? 127.0f / most : 0.0f;
}

/* The same four in every lane. */
INLINE wholes all_fours(const int8_t *p)
{
    int32_t x;
    memcpy(&x, p, 4);
    return all_wholes(x);
}
