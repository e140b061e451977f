/* All kernels for one instruction set: this file is compiled once for each, see kernels/native/build.py. */
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "simd.h"

#include "pointwise.c"

#include "whole.c"

#include "rotation.c"

#include "pack.c"

#include "linear.c"

#if defined(ISA_AMX)
#include "amx.h"

#include "amx_linear.c"
#endif

#include "attention.c"

#include "sampling.c"

#include "checksum.c"

#include "probe.c"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

static void linear_at_once(const struct rows *x, int64_t num_rows, const struct weight *weight, enum then then,
                           const struct rows *out)
{
#if defined(ISA_AMX)
    if (weight->kind == KIND_BF16 || is_quantized(weight->kind)) {
        linear_tiles(x, num_rows, weight, then, out);
        return;
    }
#endif
    linear_in_vectors(x, num_rows, weight, then, out);
}

/* Gates and what they let through must lie in panels of their own. */
static bool gates_at_once(const struct weight *weight)
{
    return weight->num_outputs % (PANEL * (USES_TILES || USES_DOTS ? PANEL_GROUP : 2)) == 0;
}

static void linear(const struct rows *x, int64_t num_rows, const struct weight *weight, enum then then,
                   const struct rows *out)
{
    if (then != GATE || gates_at_once(weight)) {
        linear_at_once(x, num_rows, weight, then, out);
        return;
    }
    int64_t width = weight->num_outputs;
    struct rows both = {scratch(SCRATCH_GATES, (size_t)(num_rows * width) * sizeof(float)), width, out->dtype};
    linear_at_once(x, num_rows, weight, STORE, &both);
    silu_mul(&both, out, num_rows, width / 2);
}

const struct kernels JOIN(kernels_, ISA_NAME) = {
    .name = TEXT(ISA_NAME),
    .fewest_rows = USES_TILES ? 64 : 16,
    .whole_rows = USES_TILES ? 32 : 4,
    .pack = pack,
    .linear = linear,
    .attention = attention,
    .rms_norm = rms_norm,
    .rotary = rotary,
    .silu_mul = silu_mul,
    .store_kv = store_kv,
    .embed = embed,
    .convert = convert,
    .draw = draw,
    .best = best,
    .hash_begin = hash_begin,
    .hash_update = hash_update,
    .hash_value = hash_value,
    .probe_read = probe_read,
    .probe_floats = probe_floats,
    .probe_bf16 = probe_bf16,
};
