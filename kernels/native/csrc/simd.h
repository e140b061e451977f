/* One vector type `vf` of W floats per instruction set; the kernels above it are written once.
 *
 * ISA_AVX512 16 lanes, ISA_AVX2 8 lanes, otherwise 4 lanes in the compiler's own vector types. Every operation is
 * exact or correctly rounded and works lane by lane, so that what a lane computes never depends on its neighbours. */
#ifndef BATON_SIMD_H
#define BATON_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "baton.h"

#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 64")

INLINE float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t bits_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

#if defined(ISA_AVX512)
#include <immintrin.h>
#define W 16
typedef __m512 vf;

INLINE vf vset(float x) { return _mm512_set1_ps(x); }
INLINE vf vload(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* 1 / a to two units in the last place, for a in [1, 2^126] */
INLINE vf vreciprocal(vf a)
{
    vf guess = _mm512_rcp14_ps(a);
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(a, guess, _mm512_set1_ps(2.0f)));
}
INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* a < b ? x : y */
INLINE vf vselect_less(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
/* a * 2^n for whole n in [-126, 127] and a in [0.5, 2] */
INLINE vf vscale2(vf a, vf n)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
}
INLINE vf vload_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE vf vload_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#if defined(ISA_BF16)
INLINE __m256i vto_bf16(vf x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
INLINE __m256i vto_bf16(vf x)
{
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
#endif
INLINE void vstore_bf16(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, vto_bf16(x)); }
INLINE void vstore_f16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* Even and odd bf16 of W pairs. */
INLINE void vload_bf16_pairs(const uint16_t *p, vf *even, vf *odd)
{
    __m512i pairs = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
INLINE void vstore_int8(int8_t *p, vf x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }
INLINE vf vload_int8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }

/* The sign of lane i turns if bit i is set. */
INLINE vf vflip(vf x, uint32_t bits) { return _mm512_mask_sub_ps(x, (__mmask16)bits, _mm512_set1_ps(-0.0f), x); }
/* Lane i takes what lane i ^ `apart` has. */
#define VSWAP_1(x) _mm512_permute_ps(x, 0xb1)
#define VSWAP_2(x) _mm512_permute_ps(x, 0x4e)
#define VSWAP_4(x) _mm512_shuffle_f32x4(x, x, 0xb1)
#define VSWAP_8(x) _mm512_shuffle_f32x4(x, x, 0x4e)

#elif defined(ISA_AVX2)
#include <immintrin.h>
#define W 8
typedef __m256 vf;

INLINE vf vset(float x) { return _mm256_set1_ps(x); }
INLINE vf vload(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vstore(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vreciprocal(vf a) { return _mm256_div_ps(_mm256_set1_ps(1.0f), a); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vselect_less(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE vf vscale2(vf a, vf n)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
INLINE vf vload_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vload_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void vstore_bf16(uint16_t *p, vf x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
INLINE void vstore_f16(uint16_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void vload_bf16_pairs(const uint16_t *p, vf *even, vf *odd)
{
    __m256i pairs = _mm256_loadu_si256((const __m256i *)p);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE void vstore_int8(int8_t *p, vf x)
{
    __m256i whole = _mm256_cvtps_epi32(x);
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(half, half));
}
INLINE vf vload_int8(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf vflip(vf x, uint32_t bits)
{
    __m256i each = _mm256_sllv_epi32(_mm256_set1_epi32((int)bits), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    return _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(each), _mm256_set1_ps(-0.0f)));
}
#define VSWAP_1(x) _mm256_permute_ps(x, 0xb1)
#define VSWAP_2(x) _mm256_permute_ps(x, 0x4e)
#define VSWAP_4(x) _mm256_permute2f128_ps(x, x, 1)

#else
#include <math.h>
#define W 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

INLINE vf vset(float x) { return (vf){x, x, x, x}; }
INLINE vf vload(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void vstore(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf vadd(vf a, vf b) { return a + b; }
INLINE vf vsub(vf a, vf b) { return a - b; }
INLINE vf vmul(vf a, vf b) { return a * b; }
INLINE vf vdiv(vf a, vf b) { return a / b; }
INLINE vf vblend(vi mask, vf x, vf y) { return (vf)((mask & (vi)x) | (~mask & (vi)y)); }
INLINE vf vmax(vf a, vf b) { return vblend(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return vblend(a < b, a, b); }
INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }
INLINE vf vround(vf a)
{
    const vf magic = {0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f}; /* |a| < 2^22: all callers clamp */
    return (a + magic) - magic;
}
INLINE vf vreciprocal(vf a) { return 1.0f / a; }
INLINE vf vfma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vselect_less(vf a, vf b, vf x, vf y) { return vblend(a < b, x, y); }
INLINE vf vscale2(vf a, vf n) { return (vf)((vi)a + (__builtin_convertvector(n, vi) << 23)); }
INLINE vf vload_bf16(const uint16_t *p)
{
    vi bits = {p[0], p[1], p[2], p[3]};
    return (vf)(bits << 16);
}
INLINE float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest < 0x0400) /* zero and subnormals: rest * 2^-24 */
        return float_of_bits(bits_of_float((float)rest * 0x1p-24f) | sign);
    uint32_t exponent = rest >= 0x7c00 ? 0x7f800000 : ((rest >> 10) + 112) << 23;
    return float_of_bits(sign | exponent | (rest & 0x3ff) << 13);
}
INLINE uint16_t float_to_half(float x)
{
    uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* subnormal in half: the float adder rounds at the right place */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}
INLINE vf vload_f16(const uint16_t *p)
{
    return (vf){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
INLINE void vstore_bf16(uint16_t *p, vf x)
{
    for (int i = 0; i < W; i++) {
        uint32_t bits = bits_of_float(x[i]);
        p[i] = x[i] != x[i] ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
INLINE void vstore_f16(uint16_t *p, vf x)
{
    for (int i = 0; i < W; i++)
        p[i] = float_to_half(x[i]);
}
INLINE void vload_bf16_pairs(const uint16_t *p, vf *even, vf *odd)
{
    vi low = {p[0], p[2], p[4], p[6]}, high = {p[1], p[3], p[5], p[7]};
    *even = (vf)(low << 16);
    *odd = (vf)(high << 16);
}
INLINE void vstore_int8(int8_t *p, vf x)
{
    vf rounded = vround(x);
    for (int i = 0; i < W; i++)
        p[i] = (int8_t)rounded[i];
}
INLINE vf vload_int8(const int8_t *p) { return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
INLINE vf vflip(vf x, uint32_t bits)
{
    const vi lanes = {1, 2, 4, 8};
    return vblend(((vi){(int)bits, (int)bits, (int)bits, (int)bits} & lanes) != 0, -x, x);
}
#define VSWAP_1(x) ((vf){(x)[1], (x)[0], (x)[3], (x)[2]})
#define VSWAP_2(x) ((vf){(x)[2], (x)[3], (x)[0], (x)[1]})
#endif

/* Sums of two lanes in the first of them, differences in the second, for lanes 1, 2, 4, ... apart in turn: the lanes times
 * a matrix of W rows of ones and minus ones (Walsh, Hadamard). */
INLINE vf vturn(vf x)
{
    static const float signs[] = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1,
                                  -1, -1, 1, 1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1,
                                  1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
    x = vfma(x, vload(signs), VSWAP_1(x));
    x = vfma(x, vload(signs + 16), VSWAP_2(x));
#if W > 4
    x = vfma(x, vload(signs + 32), VSWAP_4(x));
#endif
#if W > 8
    x = vfma(x, vload(signs + 48), VSWAP_8(x));
#endif
    return x;
}

/* Sum and maximum over the lanes, always the same tree. */
INLINE float vsum(vf x)
{
#if defined(ISA_AVX512)
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lanes[W];
    vstore(lanes, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

INLINE float vhighest(vf x)
{
#if defined(ISA_AVX512)
    __m256 eight = _mm256_max_ps(_mm512_extractf32x8_ps(x, 1), _mm512_castps512_ps256(x));
    __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
#else
    float lanes[W];
    vstore(lanes, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
#endif
}

/* The larger magnitude in each lane; one that is not a number is larger than all numbers. */
INLINE vf vmax_magnitude(vf highest, vf x)
{
#if defined(ISA_AVX512)
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(highest), _mm512_castps_si512(vabs(x))));
#elif defined(ISA_AVX2)
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(highest), _mm256_castps_si256(vabs(x))));
#else
    vi a = (vi)highest, b = (vi)vabs(x);
    return vblend(a > b, highest, (vf)b);
#endif
}

/* Of lanes that are magnitudes, the largest. */
INLINE float vhighest_magnitude(vf x)
{
    uint32_t highest = 0;
#if defined(ISA_AVX512)
    highest = _mm512_reduce_max_epu32(_mm512_castps_si512(x));
#else
    uint32_t lanes[W];
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < W; i++)
        highest = lanes[i] > highest ? lanes[i] : highest;
#endif
    float magnitude;
    memcpy(&magnitude, &highest, sizeof magnitude);
    return magnitude;
}

/* What a whole number stands for when the largest magnitude, `most`, becomes 127: NaN if some number was not finite, which
 * whole numbers could not show. */
INLINE float scale_of(float most)
{
    return (most + (most - most)) / 127.0f;
}

/* 2^x, relative error below 2e-7; exactly 1 at 0, exactly 0 below -126. The coefficients are a least-maximum-error
 * fit of degree 6 on [-1/2, 1/2] with the constant term held at 1. */
INLINE vf vexp2(vf x)
{
    vf bounded = vmin(vset(127.0f), vmax(vset(-126.0f), x)); /* in this order a NaN comes through */
    vf whole = vround(bounded);
    vf f = vsub(bounded, whole);
    vf y = vfma(f, vset(0x1.41fbbcp-13f), vset(0x1.5f3e54p-10f));
    y = vfma(y, f, vset(0x1.3b2d4cp-7f));
    y = vfma(y, f, vset(0x1.c6aee8p-5f));
    y = vfma(y, f, vset(0x1.ebfbdcp-3f));
    y = vfma(y, f, vset(0x1.62e43p-1f));
    y = vfma(y, f, vset(1.0f));
    return vselect_less(x, vset(-126.0f), vset(0.0f), vscale2(y, whole));
}

INLINE size_t dtype_bytes(enum dtype dtype)
{
    return dtype == F32 ? 4 : dtype == I8 ? 1 : 2;
}

INLINE const void *at(const void *p, size_t index, enum dtype dtype)
{
    return (const char *)p + index * dtype_bytes(dtype);
}

INLINE void *at_mut(void *p, size_t index, enum dtype dtype)
{
    return (char *)p + index * dtype_bytes(dtype);
}

/* W numbers of a type, as floats. */
INLINE vf vload_any(const void *p, enum dtype dtype)
{
    if (dtype == F32)
        return vload(p);
    return dtype == BF16 ? vload_bf16(p) : vload_f16(p);
}

INLINE void vstore_any(void *p, vf x, enum dtype dtype)
{
    if (dtype == F32)
        vstore(p, x);
    else if (dtype == BF16)
        vstore_bf16(p, x);
    else
        vstore_f16(p, x);
}

/* The first n < W numbers, the rest zero; nothing behind them is read or written. */
INLINE vf vload_part(const void *p, int n, enum dtype dtype)
{
    float whole[W];
    memset(whole, 0, sizeof whole);
    memcpy(whole, p, (size_t)n * dtype_bytes(dtype));
    return vload_any(whole, dtype);
}

INLINE void vstore_part(void *p, vf x, int n, enum dtype dtype)
{
    float whole[W];
    vstore_any(whole, x, dtype);
    memcpy(p, whole, (size_t)n * dtype_bytes(dtype));
}

INLINE vf vload_at(const void *p, long i, long n, enum dtype dtype)
{
    const void *from = at(p, (size_t)i, dtype);
    return n - i >= W ? vload_any(from, dtype) : vload_part(from, (int)(n - i), dtype);
}

INLINE void vstore_at(void *p, long i, long n, vf x, enum dtype dtype)
{
    void *to = at_mut(p, (size_t)i, dtype);
    if (n - i >= W)
        vstore_any(to, x, dtype);
    else
        vstore_part(to, x, (int)(n - i), dtype);
}

/* Elements of a cache's row: one position of one head. */
INLINE int64_t row_width(int64_t head_dim, enum dtype dtype)
{
    return head_dim + (dtype == I8 ? (int64_t)sizeof(float) : 0);
}

/* W numbers of a cache's row of n, from the i-th on, as floats. */
INLINE vf vload_cached(const void *row, long i, long n, enum dtype dtype)
{
    if (dtype != I8)
        return vload_at(row, i, n, dtype);
    const int8_t *from = (const int8_t *)row + i;
    float scale;
    memcpy(&scale, (const int8_t *)row + n, sizeof scale);
    if (n - i >= W)
        return vmul(vload_int8(from), vset(scale));
    int8_t part[W] = {0};
    memcpy(part, from, (size_t)(n - i));
    return vmul(vload_int8(part), vset(scale));
}

/* Calls body with `dtype` a compile-time constant, so that one source gives one loop per type. */
#define FOR_DTYPE(value, call)          \
    do {                                \
        switch (value) {                \
        case F32: {                     \
            const enum dtype dtype = F32; \
            call;                       \
        } break;                        \
        case BF16: {                    \
            const enum dtype dtype = BF16; \
            call;                       \
        } break;                        \
        default: {                      \
            const enum dtype dtype = F16; \
            call;                       \
        } break;                        \
        }                               \
    } while (0)

#define FOR_CACHE_DTYPE(value, call)     \
    do {                                \
        if ((value) == I8) {            \
            const enum dtype dtype = I8; \
            call;                       \
        } else {                        \
            FOR_DTYPE(value, call);     \
        }                               \
    } while (0)

#endif
