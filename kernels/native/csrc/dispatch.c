/* Which instruction set's kernels are used, and the functions that Python calls. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <string.h>

#include "baton.h"

/* Weak: a compiler that cannot make one of the sets leaves it out. */
extern const struct kernels kernels_portable;
extern const struct kernels kernels_avx2 __attribute__((weak)), kernels_avx512 __attribute__((weak)),
    kernels_avx512_bf16 __attribute__((weak)), kernels_amx __attribute__((weak));

static const struct kernels *active = &kernels_portable;

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Registers whose contents the operating system keeps across switches of threads: XCR0. */
static uint64_t kept_registers(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

static bool has(uint64_t value, uint64_t bits)
{
    return (value & bits) == bits;
}

static bool has_avx2(void)
{
    uint32_t a, b, c, d;
    if (!has(kept_registers(), 0x6) || !__get_cpuid(1, &a, &b, &c, &d) || !has(c, bit_FMA | bit_F16C))
        return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && has(b, bit_AVX2);
}

static bool has_avx512(void)
{
    uint32_t a, b, c, d;
    if (!has_avx2() || !has(kept_registers(), 0xe6) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return false;
    return has(b, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) && has(c, bit_AVX512VNNI);
}

static bool has_avx512_bf16(void)
{
    uint32_t a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, 1u << 5 /* AVX512_BF16 */);
}

/* Tiles hold 8 KiB of registers, which Linux gives to a process only when it asks; threads started later have them. */
static bool may_use_tiles(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST_COMPONENT = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_COMPONENT, TILE_DATA) == 0;
#else
    return false;
#endif
}

static bool has_amx(void)
{
    enum { AMX_BF16 = 1u << 22, AVX512_FP16 = 1u << 23, AMX_TILE = 1u << 24 };
    uint32_t a, b, c, d;
    if (!has_avx512_bf16() || !has(kept_registers(), 0x60000) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return false;
    return has(d, AMX_BF16 | AMX_TILE | AVX512_FP16) && may_use_tiles();
}
#else
static bool has_avx2(void) { return false; }
static bool has_avx512(void) { return false; }
static bool has_avx512_bf16(void) { return false; }
static bool has_amx(void) { return false; }
#endif

/* Takes the named instruction set, or the best one if the name is empty. Returns the name of the one in use from now on,
 * or null when the processor has no such set. */
const char *baton_select(const char *name)
{
    struct { const struct kernels *kernels; bool (*present)(void); } sets[] = {
        {&kernels_amx, has_amx}, {&kernels_avx512_bf16, has_avx512_bf16}, {&kernels_avx512, has_avx512},
        {&kernels_avx2, has_avx2}, {&kernels_portable, NULL}};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (sets[i].kernels == NULL || (*name != 0 && strcmp(name, sets[i].kernels->name) != 0))
            continue;
        if (sets[i].present == NULL || sets[i].present())
            return (active = sets[i].kernels)->name;
    }
    return NULL;
}

const char *baton_selected(void)
{
    return active->name;
}

const struct kernels *active_kernels(void)
{
    return active;
}

/* Plain arguments: a call from Python costs about as much as the structures it would otherwise fill. */

void baton_pack(const void *weight, int dtype, int64_t num_outputs, int64_t num_inputs, int kind, void *data)
{
    active->pack(weight, dtype, num_outputs, num_inputs, kind, data);
}

void baton_linear(void *x, int x_dtype, int64_t num_rows, const struct weight *weight, void *out, int out_dtype)
{
    struct rows from = {x, weight->num_inputs, x_dtype}, to = {out, weight->num_outputs, out_dtype};
    active->linear(&from, num_rows, weight, STORE, &to);
}

void baton_attention(const struct attention *a)
{
    active->attention(a);
}

void baton_rms_norm(void *x, void *residual, const void *weight, int dtype, float eps, int64_t num_rows, int64_t width,
                    void *out, void *sum)
{
    struct rows from = {x, width, dtype}, second = {residual, width, dtype}, to = {out, width, dtype};
    struct rows total = {sum, width, dtype};
    active->rms_norm(&from, &second, weight, eps, num_rows, width, &to, &total);
}

void baton_rotary(void *x, int64_t x_stride, void *out, int dtype, const int64_t *positions, const float *cos_sin,
                  int64_t num_rows, int num_heads, int head_dim)
{
    struct rows from = {x, x_stride, dtype}, to = {out, (int64_t)num_heads * head_dim, dtype};
    active->rotary(&from, &to, positions, cos_sin, num_rows, num_heads, head_dim);
}

void baton_silu_mul(void *gate_up, void *out, int dtype, int64_t num_rows, int64_t width)
{
    struct rows from = {gate_up, 2 * width, dtype}, to = {out, width, dtype};
    active->silu_mul(&from, &to, num_rows, width);
}

void baton_store_kv(void *k, int64_t k_stride, void *v, int64_t v_stride, int dtype, void *cache, int64_t cache_stride,
                    int cache_dtype, const int64_t *slots, int64_t num_rows, int num_kv_heads, int block_size,
                    int head_dim)
{
    struct rows keys = {k, k_stride, dtype}, values = {v, v_stride, dtype};
    active->store_kv(&keys, &values, cache, cache_stride, cache_dtype, slots, num_rows, num_kv_heads, block_size, head_dim);
}

void baton_draw(const float *const *rows, const struct choice *choices, int64_t num_rows, int64_t vocabulary,
                int64_t *token_ids)
{
    struct draws draws = {rows, choices, num_rows, vocabulary, token_ids};
    active->draw(&draws);
}

void baton_best(const float *logits, int64_t num_rows, int64_t vocabulary, int64_t *token_ids, float *values)
{
    struct bests bests = {logits, num_rows, vocabulary, token_ids, values};
    active->best(&bests);
}

void baton_hash_begin(struct hash *hash)
{
    active->hash_begin(hash);
}

/* Copies to ``target``, which may be null, what it hashes. */
void baton_hash_update(struct hash *hash, const void *source, void *target, int64_t bytes)
{
    active->hash_update(hash, source, target, bytes);
}

uint64_t baton_hash_value(const struct hash *hash)
{
    return active->hash_value(hash);
}

float baton_probe_read(const void *data, int64_t bytes)
{
    return active->probe_read(data, bytes);
}

int64_t baton_probe_floats(int64_t rounds)
{
    return active->probe_floats(rounds);
}

int64_t baton_probe_bf16(int64_t rounds)
{
    return active->probe_bf16(rounds);
}
