/* Products with weights of eight bits in whole numbers: rows of activations are turned as weights are, and rounded too, a
 * scale for each group of inputs. */

INLINE int8_t *wholes_of(const struct linear_job *job, int64_t group, int64_t row)
{
    return job->wholes + (group * job->num_rows + row) * INT8_GROUP;
}

/* The row's inputs, turned, zeros behind them, in memory of this thread. */
static float *turned_row(const struct linear_job *job, int64_t row)
{
    int64_t n = job->weight->num_inputs, padded = padded_inputs(KIND_INT8, n);
    float *x = scratch(SCRATCH_ROW, (size_t)padded * sizeof *x);
    FOR_DTYPE(job->x.dtype, turn(row_of(&job->x, row), dtype, n, x, padded));
    return x;
}

static void quantize_rows(void *context, int64_t item)
{
    const struct linear_job *job = context;
    int64_t end = min_int((item + 1) * ROWS_PER_ITEM, job->num_rows);
    int64_t padded = padded_inputs(KIND_INT8, job->weight->num_inputs), groups = count_int8_groups(padded);
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) {
        const float *x = turned_row(job, row);
        for (int64_t g = 0, start = 0; g < groups; g++, start += INT8_GROUP)
            job->rounded[g * job->num_rows + row] =
                round_group(x + start, min_int(INT8_GROUP, padded - start), wholes_of(job, g, row));
    }
}

static void prepare_wholes(struct linear_job *job)
{
    int64_t groups = count_int8_groups(padded_inputs(KIND_INT8, job->weight->num_inputs));
    size_t count = (size_t)(groups * job->num_rows);
    job->wholes = scratch(SCRATCH_ROWS, count * (INT8_GROUP + sizeof *job->rounded));
    job->rounded = (struct rounded *)(job->wholes + count * INT8_GROUP);
    parallel(row_items(job->num_rows), quantize_rows, job);
}

/* A group's products are summed exactly, then scaled and added to the chain of the output. */
INLINE void multiply_int8(const struct linear_job *job, int64_t row, int64_t panel, const int rows, const int panels,
                          float *to)
{
    const int64_t padded = padded_inputs(KIND_INT8, job->weight->num_inputs), groups = count_int8_groups(padded);
    const size_t bytes = panel_bytes(KIND_INT8, padded), ahead = (size_t)panels_of_outputs(job, panels) * bytes;
    const char *at[PANEL_GROUP];
    locate_panels(job, panel, panels, bytes, at);
    vf sums[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            sums[r][c] = vset(0);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t count = min_int(INT8_GROUP, padded - g * INT8_GROUP);
        const struct rounded *rounded = job->rounded + g * job->num_rows + row;
        const int8_t *x = wholes_of(job, g, row);
        wholes dots[MOST_QUANTIZED_ROWS][PANEL_GROUP * VPP];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < panels * VPP; c++)
                dots[r][c] = all_wholes(rounded[r].offset);
        for (int64_t i = 0; i < count; i += 4) {
            const int64_t whole = INT8_HEAD_BYTES + i * PANEL;
            wholes weights[PANEL_GROUP * VPP];
            UNROLL for (int c = 0; c < panels * VPP; c++)
                weights[c] = load_wholes(at[c / VPP] + whole + c % VPP * W * 4);
            if (rows >= MANY_QUANTIZED_ROWS)
                UNROLL for (int p = 0; p < panels; p++)
                    fetch_panel(at[p] + whole + ahead);
            UNROLL for (int r = 0; r < rows; r++) {
                wholes four = all_fours(x + r * INT8_GROUP + i);
                UNROLL for (int c = 0; c < panels * VPP; c++)
                    dots[r][c] = dot4(dots[r][c], four, weights[c]);
            }
        }
        UNROLL for (int c = 0; c < panels * VPP; c++) {
            vf scale = vload((const float *)at[c / VPP] + c % VPP * W);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][c] = vfma(as_floats(dots[r][c]), vmul(scale, vset(rounded[r].scale)), sums[r][c]);
        }
        UNROLL for (int p = 0; p < panels; p++)
            at[p] += INT8_GROUP_BYTES;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels * VPP; c++)
            vstore(to + r * RESULT_STRIDE + c * W, sums[r][c]);
}
