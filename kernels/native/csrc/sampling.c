/* The best token of each row of logits, and tokens drawn by chance, a row a time of each thread.
 *
 * Draws a token: weights 2^((logit - highest) / temperature), less those that min-p, top-k and top-p leave out.
 *
 * The bound that top-k or top-p sets is found without sorting the vocabulary: weights are counted and summed by their
 * leading bits, and only those of the bin in which the bound lies are put in order. A weight equal to the bound stays. */

enum { BIN_SHIFT = 19, NUM_BINS = 0x3f800000 / (1 << BIN_SHIFT) + 1 }; /* of weights from 0 to 1: exponent, 4 bits more */

struct bins {
    double sums[NUM_BINS];
    int64_t counts[NUM_BINS];
};

static float *weigh_logits(const float *logits, long n, float temperature, float min_p)
{
    float *weights = scratch(SCRATCH_ROWS, (size_t)round_up(n, W) * sizeof(float));
    vf highest = vset(-INFINITY);
    for (long i = 0; i + W <= n; i += W)
        highest = vmax(highest, vload(logits + i));
    float most = vhighest(highest);
    for (long i = n / W * W; i < n; i++)
        most = logits[i] > most ? logits[i] : most;
    vf scale = vset(0x1.715476p0f / temperature);
    for (long i = 0; i < n; i += W) {
        vf weight = vexp2(vmul(vsub(vload_at(logits, i, n, F32), vset(most)), scale));
        vstore_at(weights, i, n, vselect_less(weight, vset(min_p), vset(0), weight), F32);
    }
    return weights;
}

static void sort_into_bins(const float *weights, long n, struct bins *bins)
{
    memset(bins, 0, sizeof *bins);
    for (long i = 0; i < n; i++) {
        uint32_t bin = bits_of_float(weights[i]) >> BIN_SHIFT;
        bins->sums[bin] += weights[i];
        bins->counts[bin]++;
    }
}

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The bin's weights, largest first; returns how many. */
static long take_bin(const float *weights, long n, uint32_t bin, float *found)
{
    long count = 0;
    for (long i = 0; i < n; i++)
        if (bits_of_float(weights[i]) >> BIN_SHIFT == bin)
            found[count++] = weights[i];
    qsort(found, (size_t)count, sizeof *found, by_size);
    return count;
}

/* The smallest of the largest weights that are `most` in number or together reach `target`, whichever comes first. */
static float lowest_kept(const float *weights, long n, int64_t most, double target)
{
    struct bins bins;
    int64_t count = 0;
    double sum = 0;
    int bin = NUM_BINS;
    sort_into_bins(weights, n, &bins);
    while (--bin > 0 && count + bins.counts[bin] < most && sum + bins.sums[bin] < target) {
        count += bins.counts[bin];
        sum += bins.sums[bin];
    }
    if (bins.counts[bin] == 0)
        return 0;
    float *found = scratch(SCRATCH_SCALES, (size_t)bins.counts[bin] * sizeof(float));
    long size = take_bin(weights, n, (uint32_t)bin, found), i = 0;
    for (; i + 1 < size; i++) {
        sum += found[i];
        if (++count >= most || sum >= target)
            break;
    }
    return found[i];
}

static void drop_below(float *weights, long n, float bound)
{
    for (long i = 0; i < n; i += W) {
        vf weight = vload_at(weights, i, n, F32);
        vstore_at(weights, i, n, vselect_less(weight, vset(bound), vset(0), weight), F32);
    }
}

static double sum_of(const float *weights, long n)
{
    double sum = 0;
    for (long i = 0; i < n; i += W)
        sum += vsum(vload_at(weights, i, n, F32));
    return sum;
}

/* The first token at which the sum of weights passes the target; the last one of any weight if rounding keeps all below. */
static int64_t token_at(const float *weights, long n, double target)
{
    double sum = 0;
    long start = 0;
    for (; start + W < n; start += W) {
        double next = sum + vsum(vload_at(weights, start, n, F32));
        if (next > target)
            break;
        sum = next;
    }
    long last = start;
    for (long i = start; i < n; i++) {
        sum += weights[i];
        if (sum > target)
            return i;
        last = weights[i] > 0 ? i : last;
    }
    return last;
}

static void draw_one(void *context, int64_t i)
{
    const struct draws *d = context;
    const struct choice *c = &d->choices[i];
    long n = (long)d->vocabulary;
    float *weights = weigh_logits(d->rows[i], n, (float)c->temperature, (float)c->min_p);
    if (c->top_k > 0 && c->top_k < (double)n)
        drop_below(weights, n, lowest_kept(weights, n, (int64_t)c->top_k, INFINITY));
    if (c->top_p < 1)
        drop_below(weights, n, lowest_kept(weights, n, INT64_MAX, c->top_p * sum_of(weights, n)));
    d->token_ids[i] = token_at(weights, n, c->chance * sum_of(weights, n));
}

static void draw(const struct draws *d)
{
    parallel(d->num_rows, draw_one, (void *)d);
}

/* The first of the largest logits; not a number counts as largest. */
static long first_best(const float *logits, long n)
{
    long best = 0;
    for (long i = 0; i < n; i++) {
        if (logits[i] != logits[i])
            return i;
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

/* The same, by stretches: the one that has the largest is looked through once more. */
static long first_best_of_many(const float *logits, long n)
{
    enum { STRETCH = 64 * W };
    float most = -INFINITY;
    long best = 0, whole = n / W * W;
    vf differences = vset(0); /* zero while all are finite */
    for (long start = 0; start < whole; start += STRETCH) {
        vf highest = vset(-INFINITY);
        for (long i = start; i < whole && i < start + STRETCH; i += W) {
            vf x = vload(logits + i);
            highest = vmax(highest, x);
            differences = vadd(differences, vsub(x, x));
        }
        float here = vhighest(highest);
        best = here > most ? start : best;
        most = here > most ? here : most;
    }
    if (!(vsum(differences) == 0))
        return first_best(logits, n);
    while (best < whole && logits[best] != most)
        best++;
    for (long i = whole; i < n; i++) {
        if (!(logits[i] - logits[i] == 0))
            return first_best(logits, n);
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

static void find_best(void *context, int64_t i)
{
    const struct bests *b = context;
    const float *logits = b->logits + i * b->vocabulary;
    b->token_ids[i] = first_best_of_many(logits, (long)b->vocabulary);
    b->values[i] = logits[b->token_ids[i]];
}

static void best(const struct bests *b)
{
    parallel(b->num_rows, find_best, (void *)b);
}
