/* Copying and hashing in one pass over memory: what is hashed is at hand, and the copy, which nobody here reads again
 * soon, goes around the caches. The hash is XXH3 of 64 bits without a seed, for inputs of more than 240
 * bytes, fed piece by piece: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md */

enum { STRIPES_PER_BLOCK = 16, SECRET_BYTES = 192, AHEAD_BYTES = 4096, LEAST_STREAMED = 64 };
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#define STREAM_END() _mm_sfence()
#define PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define STREAM_END()
#define PREFETCH(p) __builtin_prefetch(p)
#endif

static const uint8_t hash_secret[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u

INLINE uint64_t word_at(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word; /* little-endian processors only, as everything that is sent */
}

/* The eight sums, in registers while a run of stripes goes by. */
#if defined(ISA_AVX512)
typedef struct { __m512i v; } lanes;
INLINE lanes lanes_at(const uint64_t *p) { return (lanes){_mm512_loadu_si512(p)}; }
INLINE void put_lanes(uint64_t *p, lanes s) { _mm512_storeu_si512(p, s.v); }
INLINE lanes add_stripe(lanes s, const uint8_t *source, const uint8_t *secret, uint8_t *target, bool stream)
{
    __m512i data = _mm512_loadu_si512(source);
    __m512i key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    if (target != NULL && stream)
        _mm512_stream_si512((void *)target, data);
    else if (target != NULL)
        _mm512_storeu_si512(target, data);
    return (lanes){_mm512_add_epi64(s.v, _mm512_add_epi64(product, _mm512_shuffle_epi32(data, 0x4e)))};
}
#elif defined(ISA_AVX2)
typedef struct { __m256i v[2]; } lanes;
INLINE lanes lanes_at(const uint64_t *p)
{
    const __m256i *from = (const __m256i *)p;
    return (lanes){{_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)}};
}
INLINE void put_lanes(uint64_t *p, lanes s)
{
    _mm256_storeu_si256((__m256i *)p, s.v[0]);
    _mm256_storeu_si256((__m256i *)p + 1, s.v[1]);
}
INLINE lanes add_stripe(lanes s, const uint8_t *source, const uint8_t *secret, uint8_t *target, bool stream)
{
    UNROLL for (int half = 0; half < 2; half++) {
        __m256i data = _mm256_loadu_si256((const __m256i *)source + half);
        __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret + half));
        __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
        if (target != NULL && stream)
            _mm256_stream_si256((__m256i *)target + half, data);
        else if (target != NULL)
            _mm256_storeu_si256((__m256i *)target + half, data);
        s.v[half] = _mm256_add_epi64(s.v[half], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e)));
    }
    return s;
}
#else
typedef struct { uint64_t v[8]; } lanes;
INLINE lanes lanes_at(const uint64_t *p)
{
    lanes s;
    memcpy(s.v, p, sizeof s.v);
    return s;
}
INLINE void put_lanes(uint64_t *p, lanes s) { memcpy(p, s.v, sizeof s.v); }
INLINE lanes add_stripe(lanes s, const uint8_t *source, const uint8_t *secret, uint8_t *target, bool stream)
{
    uint64_t data[8];
    (void)stream;
    memcpy(data, source, sizeof data);
    if (target != NULL)
        memcpy(target, data, sizeof data);
    UNROLL for (int i = 0; i < 8; i++) {
        uint64_t key = data[i] ^ word_at(secret + 8 * i);
        s.v[i] += data[i ^ 1] + (key & 0xffffffff) * (key >> 32);
    }
    return s;
}
#endif

INLINE lanes scramble(lanes s)
{
    uint64_t all[8];
    put_lanes(all, s);
    for (int i = 0; i < 8; i++)
        all[i] = (all[i] ^ all[i] >> 47 ^ word_at(hash_secret + SECRET_BYTES - STRIPE + 8 * i)) * PRIME32_1;
    return lanes_at(all);
}

/* Whole stripes; ``target`` may be null. ``stream``: it is aligned, and written around the caches. */
INLINE void add_stripes(struct hash *hash, const uint8_t *source, uint8_t *target, int64_t count, bool stream)
{
    lanes s = lanes_at(hash->sums);
    while (count > 0) {
        int64_t first = hash->stripe, end = first + count < STRIPES_PER_BLOCK ? first + count : STRIPES_PER_BLOCK;
        for (int64_t stripe = first; stripe < end; stripe++) {
            PREFETCH(source + AHEAD_BYTES);
            s = add_stripe(s, source, hash_secret + 8 * stripe, target, stream);
            source += STRIPE;
            if (target != NULL)
                target += STRIPE;
        }
        count -= end - first;
        hash->stripe = end % STRIPES_PER_BLOCK;
        if (end == STRIPES_PER_BLOCK)
            s = scramble(s);
    }
    put_lanes(hash->sums, s);
}

INLINE void keep(struct hash *hash, const uint8_t *source, uint8_t *target, int64_t bytes)
{
    memcpy(hash->pending + hash->num_pending, source, (size_t)bytes);
    if (target != NULL)
        memcpy(target, source, (size_t)bytes);
    hash->num_pending += bytes;
}

/* The last stripe, whole or not, is kept back: it is added in another way. */
INLINE void hash_into(struct hash *hash, const uint8_t *source, uint8_t *target, int64_t bytes)
{
    if (bytes == 0)
        return;
    hash->num_bytes += bytes;
    if (hash->num_pending + bytes > STRIPE && hash->num_pending > 0) {
        int64_t missing = STRIPE - hash->num_pending;
        keep(hash, source, target, missing);
        add_stripes(hash, hash->pending, NULL, 1, false);
        memcpy(hash->before, hash->pending, STRIPE);
        hash->num_pending = 0;
        source += missing, bytes -= missing;
        if (target != NULL)
            target += missing;
    }
    int64_t whole = hash->num_pending == 0 ? (bytes - 1) / STRIPE : 0;
    if (whole > 0) {
        if (target != NULL && (uintptr_t)target % STRIPE == 0 && whole >= LEAST_STREAMED) {
            add_stripes(hash, source, target, whole, true);
            STREAM_END();
        } else {
            add_stripes(hash, source, target, whole, false);
        }
        source += whole * STRIPE;
        memcpy(hash->before, source - STRIPE, STRIPE);
        if (target != NULL)
            target += whole * STRIPE;
    }
    keep(hash, source, target, bytes - whole * STRIPE);
}

static void hash_update(struct hash *hash, const void *source, void *target, int64_t bytes)
{
    if (target == NULL)
        hash_into(hash, source, NULL, bytes);
    else
        hash_into(hash, source, target, bytes);
}

static void hash_begin(struct hash *hash)
{
    const uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    *hash = (struct hash){0};
    memcpy(hash->sums, sums, sizeof sums);
}

static uint64_t hash_value(const struct hash *hash)
{
    uint8_t last[STRIPE];
    uint64_t s[8], value = (uint64_t)hash->num_bytes * PRIME64_1;
    memcpy(last, hash->before + hash->num_pending, (size_t)(STRIPE - hash->num_pending));
    memcpy(last + STRIPE - hash->num_pending, hash->pending, (size_t)hash->num_pending);
    put_lanes(s, add_stripe(lanes_at(hash->sums), last, hash_secret + SECRET_BYTES - STRIPE - 7, NULL, false));
    for (int i = 0; i < 8; i += 2) {
        const uint8_t *secret = hash_secret + 11 + 8 * i;
        unsigned __int128 product = (unsigned __int128)(s[i] ^ word_at(secret)) * (s[i + 1] ^ word_at(secret + 8));
        value += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    value = (value ^ value >> 37) * 0x165667919E3779F9u;
    return value ^ value >> 32;
}
