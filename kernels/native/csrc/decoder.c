/* A whole step of the decoder in one call: the same kernels, with nothing but C between them.
 *
 * The residual stream is kept in float32, which costs nothing here and loses less than rounding it after each layer;
 * all else is in the model's type. */
#include "baton.h"

struct buffers {
    struct rows residual;         /* [T, hidden] float32 */
    struct rows x;                /* [T, hidden] */
    struct rows qkv;              /* [T, (H + 2 G) * D] */
    struct rows mixed;            /* [T, H * D] */
    struct rows product;          /* [T, I] */
};

static struct rows buffer(char **memory, int64_t num_tokens, int64_t width, int32_t dtype)
{
    struct rows rows = {*memory, width, dtype};
    *memory += ((size_t)(num_tokens * width) * (dtype == F32 ? 4 : 2) + 63) & ~(size_t)63;
    return rows;
}

static struct buffers lay_out(const struct decoder *d, int64_t num_tokens, char *memory)
{
    const struct layer *first = &d->layers[0];
    struct buffers b;
    b.residual = buffer(&memory, num_tokens, d->hidden, F32);
    b.x = buffer(&memory, num_tokens, d->hidden, d->dtype);
    b.qkv = buffer(&memory, num_tokens, first->qkv->num_outputs, d->dtype);
    b.mixed = buffer(&memory, num_tokens, first->o->num_inputs, d->dtype);
    b.product = buffer(&memory, num_tokens, first->down->num_inputs, d->dtype);
    return b;
}

static struct rows columns(const struct rows *x, int64_t first)
{
    return (struct rows){(char *)x->data + first * (x->dtype == F32 ? 4 : 2), x->stride, x->dtype};
}

static void norm_heads(const struct decoder *d, const struct rows *heads, int num_heads, const void *weight, int64_t rows)
{
    const struct rows none = {0};
    for (int h = 0; weight && h < num_heads; h++) {
        struct rows head = columns(heads, (int64_t)h * d->head_dim);
        active_kernels()->rms_norm(&head, &none, weight, d->eps, rows, d->head_dim, &head, &none);
    }
}

static void attend(const struct decoder *d, const struct step *s, int index, const struct buffers *b)
{
    const struct layer *layer = &d->layers[index];
    const struct kernels *kernels = active_kernels();
    int64_t rows = s->num_tokens, keys = (int64_t)d->num_heads * d->head_dim;
    int64_t values = keys + (int64_t)d->num_kv_heads * d->head_dim;
    struct rows q = b->qkv, k = columns(&b->qkv, keys), v = columns(&b->qkv, values);
    kernels->linear(&b->x, rows, layer->qkv, STORE, &b->qkv);
    norm_heads(d, &q, d->num_heads, layer->q_norm, rows);
    norm_heads(d, &k, d->num_kv_heads, layer->k_norm, rows);
    kernels->rotary(&q, &q, s->positions, d->cos_sin, rows, d->num_heads + d->num_kv_heads, d->head_dim);
    struct attention a = s->attention;
    kernels->store_kv(&k, &v, s->caches[index], a.cache_stride, a.cache_dtype, s->slots, rows, d->num_kv_heads,
                      a.block_size, d->head_dim);
    a.q = q;
    a.out = b->mixed;
    a.cache = s->caches[index];
    a.window = layer->window;
    kernels->attention(&a);
    kernels->linear(&b->mixed, rows, layer->o, ADD, &b->residual);
}

static void norm(const struct decoder *d, const struct step *s, const void *weight, const struct buffers *b)
{
    const struct rows none = {0};
    active_kernels()->rms_norm(&b->residual, &none, weight, d->eps, s->num_tokens, d->hidden, &b->x, &none);
}

static void feed_forward(const struct decoder *d, const struct step *s, const struct layer *layer, const struct buffers *b)
{
    const struct kernels *kernels = active_kernels();
    norm(d, s, layer->mlp_norm, b);
    kernels->linear(&b->x, s->num_tokens, layer->gate_up, GATE, &b->product);
    kernels->linear(&b->product, s->num_tokens, layer->down, ADD, &b->residual);
}

static size_t bytes_needed(const struct decoder *d, int64_t num_tokens)
{
    const struct layer *first = &d->layers[0];
    int64_t widths = 2 * d->hidden + first->qkv->num_outputs + first->o->num_inputs + first->down->num_inputs;
    return (size_t)(num_tokens * widths) * sizeof(float) + 5 * 64;
}

/* Keys and values go to the caches, hidden states to s->out. */
void baton_forward(const struct decoder *d, const struct step *s)
{
    const struct kernels *kernels = active_kernels();
    const struct rows out = {s->out, d->hidden, d->dtype};
    struct buffers b = lay_out(d, s->num_tokens, scratch(SCRATCH_DECODER, bytes_needed(d, s->num_tokens)));
    kernels->embed(d->embedding, d->dtype, s->token_ids, s->num_tokens, d->hidden, &b.residual);
    for (int index = 0; index < d->num_layers; index++) {
        norm(d, s, d->layers[index].input_norm, &b);
        attend(d, s, index, &b);
        if (s->tell && ((index + 1) % s->tell_every == 0 || index + 1 == d->num_layers))
            s->tell(index + 1);
        feed_forward(d, s, &d->layers[index], &b);
    }
    kernels->convert(&b.residual, s->num_tokens, d->hidden, &out);
}
