/* A whole step of the decoder in one call: the same kernels, with nothing but C between them.
 *
 * All but attention takes rows one by one, so a thread takes a block of rows through it, from the end of one attention to
 * the beginning of the next: what passes from one kernel to the next stays in its own cache, and threads wait for
 * each other twice a layer. A step of few rows is one block, and threads share out each kernel's outputs instead: then
 * it is weights that cost, and each is to be read once.
 *
 * The residual stream is kept in float32, which costs nothing here and loses less than rounding it after each layer;
 * all else is in the model's type. */
#include <stdbool.h>
#include <string.h>

#include "baton.h"

enum { MOST_ROWS = 288 }; /* of a block: they fit a core's cache */

struct buffers {
    struct rows residual;         /* [T, hidden] float32 */
    struct rows qkv;              /* [T, (H + 2 G) * D] */
    struct rows mixed;            /* [T, H * D] */
};

struct forward {
    const struct decoder *d;
    const struct step *s;
    struct buffers b;
    const int32_t *query_starts; /* [S + 1] */
    int64_t num_rows, rows_per_block;
    int next_layer; /* the blocks go from this one's attention on to the next, or begin or end */
};

/* Some rows of a step. */
struct block {
    int64_t first, count;
    struct rows residual, qkv, mixed;
    struct rows x;                /* [count, hidden] */
    struct rows product;          /* [count, I] */
};

static int64_t bytes_of(int32_t dtype)
{
    return dtype == F32 ? 4 : 2;
}

static struct rows buffer(char **memory, int64_t num_tokens, int64_t width, int32_t dtype)
{
    struct rows rows = {*memory, width, dtype};
    *memory += ((size_t)(num_tokens * width * bytes_of(dtype)) + 63) & ~(size_t)63;
    return rows;
}

static struct buffers lay_out(const struct decoder *d, int64_t num_tokens)
{
    const struct layer *first = &d->layers[0];
    int64_t widths = d->hidden + first->qkv->num_outputs + first->o->num_inputs;
    char *memory = scratch(SCRATCH_DECODER, (size_t)(num_tokens * widths) * sizeof(float) + 3 * 64);
    struct buffers b;
    b.residual = buffer(&memory, num_tokens, d->hidden, F32);
    b.qkv = buffer(&memory, num_tokens, first->qkv->num_outputs, d->dtype);
    b.mixed = buffer(&memory, num_tokens, first->o->num_inputs, d->dtype);
    return b;
}

static struct rows columns(const struct rows *x, int64_t first)
{
    return (struct rows){(char *)x->data + first * bytes_of(x->dtype), x->stride, x->dtype};
}

static struct rows rows_from(const struct rows *x, int64_t row)
{
    return columns(x, row * x->stride);
}

static struct block block_of(const struct forward *f, int64_t index)
{
    const struct decoder *d = f->d;
    int64_t first = index * f->rows_per_block, rest = f->num_rows - first, width = d->layers[0].down->num_inputs;
    struct block block = {.first = first, .count = rest < f->rows_per_block ? rest : f->rows_per_block};
    char *memory = scratch(SCRATCH_BLOCK, (size_t)(f->rows_per_block * (d->hidden + width)) * sizeof(float) + 2 * 64);
    block.residual = rows_from(&f->b.residual, first);
    block.qkv = rows_from(&f->b.qkv, first);
    block.mixed = rows_from(&f->b.mixed, first);
    block.x = buffer(&memory, f->rows_per_block, d->hidden, d->dtype);
    block.product = buffer(&memory, f->rows_per_block, width, d->dtype);
    return block;
}

static void norm_heads(const struct decoder *d, const struct rows *heads, int num_heads, const void *weight, int64_t rows)
{
    const struct rows none = {0};
    for (int h = 0; weight && h < num_heads; h++) {
        struct rows head = columns(heads, (int64_t)h * d->head_dim);
        active_kernels()->rms_norm(&head, &none, weight, d->eps, rows, d->head_dim, &head, &none);
    }
}

static void norm(const struct decoder *d, const void *weight, const struct block *b)
{
    const struct rows none = {0};
    active_kernels()->rms_norm(&b->residual, &none, weight, d->eps, b->count, d->hidden, &b->x, &none);
}

/* Queries to b->qkv, keys and values to the cache. */
static void project(const struct forward *f, int index, const struct block *b)
{
    const struct decoder *d = f->d;
    const struct step *s = f->s;
    const struct layer *layer = &d->layers[index];
    const struct kernels *kernels = active_kernels();
    const struct attention *a = &s->attention;
    int64_t keys = (int64_t)d->num_heads * d->head_dim, values = keys + (int64_t)d->num_kv_heads * d->head_dim;
    struct rows q = b->qkv, k = columns(&b->qkv, keys), v = columns(&b->qkv, values);
    norm(d, layer->input_norm, b);
    kernels->linear(&b->x, b->count, layer->qkv, STORE, &b->qkv);
    norm_heads(d, &q, d->num_heads, layer->q_norm, b->count);
    norm_heads(d, &k, d->num_kv_heads, layer->k_norm, b->count);
    kernels->rotary(&q, &q, s->positions + b->first, d->cos_sin, b->count, d->num_heads + d->num_kv_heads, d->head_dim);
    kernels->store_kv(&k, &v, s->caches[index], a->cache_stride, a->cache_dtype, s->slots + b->first, b->count,
                      d->num_kv_heads, a->block_size, d->head_dim);
}

static void attend(const struct forward *f, int index)
{
    struct attention a = f->s->attention;
    a.q = f->b.qkv;
    a.out = f->b.mixed;
    a.query_starts = f->query_starts;
    a.cache = f->s->caches[index];
    a.window = f->d->layers[index].window;
    active_kernels()->attention(&a);
}

static void feed_forward(const struct decoder *d, const struct layer *layer, const struct block *b)
{
    const struct kernels *kernels = active_kernels();
    kernels->linear(&b->mixed, b->count, layer->o, ADD, &b->residual);
    norm(d, layer->mlp_norm, b);
    kernels->linear(&b->x, b->count, layer->gate_up, GATE, &b->product);
    kernels->linear(&b->product, b->count, layer->down, ADD, &b->residual);
}

/* A block of rows from one attention to the next: from token ids to the first, from the last to hidden states. */
static void pass_block(void *context, int64_t index)
{
    const struct forward *f = context;
    const struct decoder *d = f->d;
    const struct kernels *kernels = active_kernels();
    const struct block b = block_of(f, index);
    if (f->next_layer == 0)
        kernels->embed(d->embedding, d->dtype, f->s->token_ids + b.first, b.count, d->hidden, &b.residual);
    else
        feed_forward(d, &d->layers[f->next_layer - 1], &b);
    if (f->next_layer < d->num_layers) {
        project(f, f->next_layer, &b);
    } else {
        struct rows whole = {f->s->out, d->hidden, d->dtype}, out = rows_from(&whole, b.first);
        kernels->convert(&b.residual, b.count, d->hidden, &out);
    }
}

/* As many blocks for every thread, about equally high: rounded up, so that the last one may be lower. Where threads would
 * wait for each other too long, or the blocks were too low, one. */
static int64_t rows_per_block(int64_t num_tokens)
{
    int64_t unit = active_kernels()->whole_rows;
    int64_t threads = num_threads(), rounds = (num_tokens + threads * MOST_ROWS - 1) / (threads * MOST_ROWS);
    int64_t rows = (num_tokens + rounds * threads - 1) / (rounds * threads), whole = (rows + unit - 1) / unit * unit;
    bool even = whole * rounds * threads - num_tokens <= num_tokens / 8;
    return rows >= active_kernels()->fewest_rows && even ? whole : num_tokens;
}

static void pass(struct forward *f)
{
    if (f->num_rows == 0)
        return;
    f->rows_per_block = rows_per_block(f->num_rows);
    parallel((f->num_rows + f->rows_per_block - 1) / f->rows_per_block, pass_block, f);
}

/* From here on only rows whose hidden states are wanted: they move to the front. */
static void keep_outputs(struct forward *f)
{
    const struct step *s = f->s;
    const int32_t *all = f->query_starts;
    int32_t *kept = scratch(SCRATCH_OUTPUTS, (size_t)(s->attention.num_sequences + 1) * sizeof *kept);
    size_t width = (size_t)(f->d->num_heads * f->d->head_dim * bytes_of(f->d->dtype)); /* queries: keys are in the cache */
    size_t hidden = (size_t)f->d->hidden * sizeof(float);
    int64_t count = 0;
    for (int64_t i = 0; i < s->num_outputs; i++) {
        memmove(rows_from(&f->b.qkv, i).data, rows_from(&f->b.qkv, s->output_rows[i]).data, width);
        memmove(rows_from(&f->b.residual, i).data, rows_from(&f->b.residual, s->output_rows[i]).data, hidden);
    }
    for (int32_t sequence = 0; sequence <= s->attention.num_sequences; sequence++) {
        while (count < s->num_outputs && s->output_rows[count] < all[sequence])
            count++;
        kept[sequence] = (int32_t)count;
    }
    f->query_starts = kept;
    f->num_rows = s->num_outputs;
}

/* Keys and values go to the caches, hidden states to s->out. */
void baton_forward(const struct decoder *d, const struct step *s)
{
    struct forward f = {d, s, lay_out(d, s->num_tokens), s->attention.query_starts, s->num_tokens, 0, 0};
    pass(&f);
    for (int index = 0; index < d->num_layers; index++) {
        if (index + 1 == d->num_layers && s->num_outputs < s->num_tokens)
            keep_outputs(&f);
        attend(&f, index);
        if (s->tell && ((index + 1) % s->tell_every == 0 || index + 1 == d->num_layers))
            s->tell(index + 1);
        f.next_layer = index + 1;
        pass(&f);
    }
}
