/* Draws a token: weights 2^((logit - highest) / temperature), less those that min-p, top-k and top-p leave out.
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

static int64_t draw(const float *logits, int64_t vocabulary, float temperature, float min_p, int64_t top_k, double top_p,
                    double chance)
{
    long n = (long)vocabulary;
    float *weights = weigh_logits(logits, n, temperature, min_p);
    if (top_k > 0 && top_k < n)
        drop_below(weights, n, lowest_kept(weights, n, top_k, INFINITY));
    if (top_p < 1)
        drop_below(weights, n, lowest_kept(weights, n, INT64_MAX, top_p * sum_of(weights, n)));
    return token_at(weights, n, chance * sum_of(weights, n));
}
