"""What it costs that a row's result is the same bits whatever it is computed with.

    python -m benchmarks.invariance [--cores 0] [--repeats 15]

The kernels in C against PyTorch's own in bfloat16 (oneDNN's products with weights packed beforehand, and
attention over keys and values that lie in one piece), which may add in any order: by turns, with the sizes of
the default model, all layers of it. *Same bits*: whether a row has the same result in any number of rows."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    SHAPES,
    WIDE,
    context,
    elapsed,
    packed_layers,
    run_packed,
)
from kernels import native

ROWS = (1, 8, 32, 128, 512, 2048)
ATTENTION = ((1, 2048, 1), (1, 256, 32), (512, 512, 1), (2048, 2048, 1))
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5


class Timed(NamedTuple):
    name: str
    seconds: float
    free_seconds: float


def timed(name: str, ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> Timed:
    """The least of each, by turns."""
    pairs = [(elapsed(ours), elapsed(theirs)) for _ in range(repeats + 1)][1:]
    return Timed(name, min(pair[0] for pair in pairs), min(pair[1] for pair in pairs))


def linears(repeats: int) -> list[Timed]:
    plain, packed = packed_layers(DTYPE, None)
    found = []
    for rows in ROWS:
        x = {width: torch.randn(rows, width).to(DTYPE) for width in (HIDDEN, WIDE)}
        free = [[free_linear(weight, rows) for weight in layer] for layer in plain]
        widths = [shape[1] for shape in SHAPES]
        theirs = partial(run_free, free, [x[width] for width in widths])
        found.append(timed(f"products, {rows} rows", partial(run_packed, packed, x), theirs, repeats))
    return found


def free_linear(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """PyTorch's, with the weight laid out for so many rows."""
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, laid_out, None, "none", [], "")


def run_free(free: Sequence[Sequence[Callable[[Tensor], Tensor]]], x: Sequence[Tensor]) -> None:
    for layer in free:
        for call, rows in zip(layer, x, strict=True):
            call(rows)


def attentions(repeats: int) -> list[Timed]:
    found = []
    for queries, length, sequences in ATTENTION:
        q, cache, batch = context(queries, length, sequences, DTYPE)
        together = q.view(sequences, queries, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = torch.randn(2, sequences, GROUPS, length, HEAD_DIM).to(DTYPE)
        ours = partial(layers, partial(native.paged_attention, q, cache, batch, SCALE, 0))
        theirs = partial(
            layers,
            partial(
                F.scaled_dot_product_attention,
                together,
                k,
                v,
                is_causal=queries > 1,
                scale=SCALE,
                enable_gqa=True,
            ),
        )
        name = f"attention, {sequences} x {queries} of {length}"
        found.append(timed(name, ours, theirs, repeats))
    return found


def layers(call: Callable[[], object]) -> None:
    for _ in range(LAYERS):
        call()


def same_bits() -> dict[str, bool]:
    """Whether rows of a product are what they are among all."""
    weight = torch.randn(SHAPES[3]).to(DTYPE)
    packed = native.pack_linear(weight, None, None)
    x = torch.randn(max(ROWS), SHAPES[3][1]).to(DTYPE)
    ours = [native.linear(x[:rows], packed) for rows in ROWS]
    theirs = [free_linear(weight, rows)(x[:rows]) for rows in ROWS]
    return {
        name: all(torch.equal(part, parts[-1][: len(part)]) for part in parts)
        for name, parts in (("Baton's", ours), ("PyTorch's", theirs))
    }


def table(found: Sequence[Timed]) -> str:
    rows = [
        f"| {one.name} | {1e3 * one.seconds:.2f} | {1e3 * one.free_seconds:.2f} "
        f"| {one.seconds / one.free_seconds:.2f} |"
        for one in found
    ]
    head = ["| all layers | Baton ms | PyTorch ms | ratio |", "|---|--:|--:|--:|"]
    return "\n".join(head + rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.invariance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cores", default=str(min(os.sched_getaffinity(0))), help="such as 0,1")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if (reason := native.available()) is not None:
        print(f"the kernels in C are not to be had: {reason}", file=sys.stderr)
        return 2
    cores = {int(core) for core in options.cores.split(",")}
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    native.set_num_threads(len(cores))
    with torch.inference_mode():
        print(table(linears(options.repeats) + attentions(options.repeats)))
        for name, same in same_bits().items():
            print(f"{name} rows have {'the same' if same else 'other'} bits in other numbers of rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
