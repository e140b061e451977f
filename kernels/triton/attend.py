"""The loop over keys that prefill and decode share."""

import triton
import triton.language as tl


@triton.jit
def attend(
    q,  # [M, D]
    positions,  # [M], of the rows of q in their sequence
    keys_ptr,  # of one head in block 0: [B, HEAD_DIM]; values_offset behind it lie its values
    table_ptr,  # the sequence's blocks
    start,
    end,  # keys from start to before end
    values_offset,
    stride_block,
    log_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,  # in one turn of the loop
):
    """-> sums of weighted values [M, D], largest scores [M], sums of weights [M], all float32; a row that saw
    no key has -inf for the largest score. Scores are in powers of two."""
    D: tl.constexpr = q.shape[1]
    dim = tl.arange(0, D)
    largest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    weights = tl.zeros([q.shape[0]], tl.float32)
    sums = tl.zeros([q.shape[0], D], tl.float32)
    for first in range(start, end, KEYS):
        at = first + tl.arange(0, KEYS)
        is_key = at < end
        block = tl.load(table_ptr + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        row = block * stride_block + (at % BLOCK_SIZE) * HEAD_DIM
        # Where there is no key or no dimension, zeros: what lies there may be anything, NaN included.
        inside = is_key[:, None] & (dim[None, :] < HEAD_DIM)
        place = keys_ptr + row[:, None] + dim[None, :]  # [KEYS, D]
        k = tl.load(place, mask=inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log_scale  # [M, KEYS]
        seen = is_key[None, :] & (at[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)  # -inf minus -inf is no number
        chances = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        v = tl.load(place + values_offset, mask=inside, other=0.0).to(q.dtype)
        sums = sums * shrink[:, None] + tl.dot(chances.to(q.dtype), v, input_precision="ieee")
        weights = weights * shrink + tl.sum(chances, 1)
        largest = highest
    return sums, largest, weights
