/* What the parts of the library and the Python side agree on. Letters in shapes as in kernels/__init__.py. */
#ifndef BATON_H
#define BATON_H

#include <stddef.h>
#include <stdint.h>

enum dtype { F32, BF16, F16, I8 }; /* the last one of caches: a row's numbers, then their scale, a float */
enum block_format { BLOCK_Q8_0 = 16, BLOCK_Q4_0, BLOCK_Q4_1 }; /* types of weights in GGUF files, blocks of GROUP inputs */

/* How a weight matrix [O, I] is laid out: panels of PANEL outputs, zero padded to whole groups of panels; in a panel
 *   f32, f16  [I][PANEL]
 *   bf16      [I / 2][PANEL][2], I padded to a multiple of 32
 *   int8      of turned rows (rotation.c), for every INT8_GROUP inputs (the last ones maybe fewer, zero padded to a multiple
 *             of SPAN): scales [PANEL], floats, then the whole numbers [inputs / 4][PANEL][4]
 *   int4      for every SPAN inputs (zero padded): scales [2][PANEL] in half precision, one for each GROUP inputs of an
 *             output, what stands for zero [2][PANEL], both times INT4_FACTOR, then for each group the numbers, two to a
 *             byte
 * The order of whole numbers is the instruction set's own: pack.c. */
enum kind { KIND_F32, KIND_BF16, KIND_F16, KIND_INT8, KIND_INT4 };
#define PANEL 16
#define PANEL_GROUP 4
#define GROUP 32
#define SPAN 64
#define INT8_GROUP (3 * SPAN)
#define INT8_HEAD_BYTES (PANEL * 4)
#define INT8_GROUP_BYTES (INT8_HEAD_BYTES + INT8_GROUP * PANEL)
#define INT4_SPAN_BYTES (2 * 2 * PANEL * 2 + SPAN * PANEL / 2)
#define INT4_FACTOR 256.0f /* keeps small scales in the normal range of half precision */

struct weight {
    const void *data;
    const float *bias; /* [O padded] or null */
    int64_t num_inputs;
    int64_t num_outputs;
    int32_t kind;
};

/* A matrix of activations; rows may lie apart. */
struct rows {
    void *data;
    int64_t stride; /* in elements */
    int32_t dtype;
};

/* What becomes of a product: it is stored, added to what is there, or, the first half of the outputs being gates and the
 * second half what they let through, silu(gate) * up is stored. */
enum then { STORE, ADD, GATE };

struct attention {
    struct rows q;   /* [T, H * D] */
    struct rows out; /* [T, H * D] */
    const void *cache; /* [N, 2, G, B, D] of one layer */
    int64_t cache_stride; /* elements from block to block */
    const int32_t *query_starts; /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    const int32_t *block_tables; /* [S, table_stride] */
    int64_t table_stride;
    int32_t num_sequences, num_heads, num_kv_heads, head_dim, block_size, window;
    int32_t cache_dtype;
    float scale;
};

/* A decoder of the Llama family; everything stays the caller's. */
struct layer {
    const void *input_norm, *mlp_norm;  /* [hidden] */
    const void *q_norm, *k_norm;        /* [D] or null */
    const struct weight *qkv, *o, *gate_up, *down;
    int32_t window;
};

struct decoder {
    const struct layer *layers;
    const void *embedding; /* [V, hidden] */
    const float *cos_sin;  /* [positions, D] */
    int64_t hidden;
    int32_t num_layers, num_heads, num_kv_heads, head_dim;
    int32_t dtype;         /* of norms, embedding, activations and the result */
    float eps;
};

struct step {
    const int64_t *token_ids, *positions, *slots; /* [T] */
    int64_t num_tokens;
    void *const *caches;                          /* one layer's [N, 2, G, B, D] each */
    struct attention attention;                   /* all but q, out, cache, window */
    const int64_t *output_rows;                   /* [R], ascending, of a sequence its last ones; read if R < T */
    int64_t num_outputs;                          /* R */
    void *out;                                    /* [R, hidden] */
    void (*tell)(int32_t num_layers);             /* so many layers' keys and values are in the caches; or null */
    int32_t tell_every;                           /* layers; of the last one in any case */
};

/* What a token is drawn by; top_k 0 takes all. */
struct choice {
    double temperature, min_p, top_k, top_p, chance;
};

struct draws {
    const float *const *rows; /* of logits [V] */
    const struct choice *choices;
    int64_t num_rows, vocabulary;
    int64_t *token_ids;
};

struct bests {
    const float *logits; /* [S, V] */
    int64_t num_rows, vocabulary;
    int64_t *token_ids;
    float *values;
};

/* A hash under way: csrc/checksum.c. */
#define STRIPE 64
struct hash {
    uint64_t sums[8];
    int64_t stripe;    /* in its block of stripes: which is next */
    int64_t num_bytes;
    int64_t num_pending;
    uint8_t before[STRIPE], pending[STRIPE]; /* the last whole stripe, and what came after it */
};

/* One instruction set's kernels. */
struct kernels {
    const char *name;
    int64_t fewest_rows; /* that a thread takes for itself: with fewer it would wait for weights */
    int64_t whole_rows;  /* linear layers take rows in as many */
    void (*pack)(const void *weight, int dtype, int64_t num_outputs, int64_t num_inputs, int kind, void *data);
    void (*linear)(const struct rows *x, int64_t num_rows, const struct weight *weight, enum then then,
                   const struct rows *out);
    void (*attention)(const struct attention *a);
    void (*rms_norm)(const struct rows *x, const struct rows *residual, const void *weight, float eps, int64_t num_rows,
                     int64_t width, const struct rows *out, const struct rows *sum);
    void (*rotary)(const struct rows *x, const struct rows *out, const int64_t *positions, const float *cos_sin,
                   int64_t num_rows, int num_heads, int head_dim);
    void (*silu_mul)(const struct rows *gate_up, const struct rows *out, int64_t num_rows, int64_t width);
    void (*store_kv)(const struct rows *k, const struct rows *v, void *cache, int64_t cache_stride, int cache_dtype,
                     const int64_t *slots, int64_t num_rows, int num_kv_heads, int block_size, int head_dim);
    void (*embed)(const void *table, int dtype, const int64_t *token_ids, int64_t num_rows, int64_t width,
                  const struct rows *out);
    void (*convert)(const struct rows *x, int64_t num_rows, int64_t width, const struct rows *out);
    void (*draw)(const struct draws *draws);
    void (*best)(const struct bests *bests);
    void (*hash_begin)(struct hash *hash);
    void (*hash_update)(struct hash *hash, const void *source, void *target, int64_t bytes);
    uint64_t (*hash_value)(const struct hash *hash);
    float (*probe_read)(const void *data, int64_t bytes);
    int64_t (*probe_floats)(int64_t rounds);
    int64_t (*probe_bf16)(int64_t rounds);
};

const struct kernels *active_kernels(void);

/* Runs body(context, i) for every i below count, on the pool's threads and the caller's; returns when all are done.
 * Which thread runs which i is left open, so no result may depend on it. */
void parallel(int64_t count, void (*body)(void *context, int64_t i), void *context);
int64_t num_threads(void);

/* Memory of this thread that lives until its next request for the same slot; 64-byte aligned. */
void *scratch(int slot, size_t bytes);
enum scratch_slot {
    SCRATCH_ROWS,
    SCRATCH_ROW,
    SCRATCH_SCALES,
    SCRATCH_TILE,
    SCRATCH_SHARES,
    SCRATCH_PARTS,
    SCRATCH_GATES,
    SCRATCH_BLOCK,
    SCRATCH_DECODER,
    SCRATCH_OUTPUTS,
    NUM_SCRATCH_SLOTS
};

#endif
