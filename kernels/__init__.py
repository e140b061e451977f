"""The arithmetic of the model behind one small interface.

``Ops`` is what the decoder calls; a plain module with these functions is an implementation. ``kernels.cpu``
is written in PyTorch and is the specification: every other implementation is tested against it. ``select``
picks by device.

Letters in shapes: T tokens in the step, S sequences, H query heads, G key/value heads, D head dim, B block
size, N blocks in the pool, I input features, O output features, V vocabulary."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.quantization import BlockWeight, Quantization

logger = logging.getLogger(__name__)

# What is left to PyTorch on a CPU, of the functions that it leaves to oneMKL.
VECTOR_FUNCTIONS = (torch.cos, torch.exp, torch.sin)


class Watch(NamedTuple):
    """Who hears while a step is computed, in the thread that computes it, how many layers' keys and values
    are in the cache: after ``every`` layers, and when all are. For CPUs, where a layer that ``forward`` has
    passed is computed."""

    every: int
    tell: Callable[[int], object]

    def passed(self, num_layers: int, of: int) -> None:
        if num_layers % self.every == 0 or num_layers == of:
            self.tell(num_layers)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens of a step belong to which sequence, and where their keys and values are.

    Sequence ``s`` owns rows ``query_starts[s]:query_starts[s + 1]`` of the step's tokens. They are the last
    ones of its ``context_lens[s]`` tokens, all of whose keys and values are in the blocks ``block_tables[s]``
    when attention runs."""

    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32, at least the number of query rows
    block_tables: Tensor  # [S, max blocks] int32, unused entries 0
    slots: Tensor  # [T] int64: block * B + offset, where each token's key and value are stored
    positions: Tensor  # [T] int64
    max_query_len: int
    max_context_len: int
    output_rows: Tensor | None = None  # [R] int64, ascending, of a sequence its last ones; None: all
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix as an implementation wants it; only the module that packed it looks inside."""

    data: tuple[Tensor, ...]
    bias: Tensor | None
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of the decoder."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeight  # rows: queries, keys, values
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    o: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight  # rows: gate, up
    down: LinearWeight
    window: int  # positions a token sees; 0: all


class Forward(Protocol):
    def __call__(self, token_ids: Tensor, batch: AttentionBatch, caches: Sequence[Tensor]) -> Tensor:
        """All layers for ``token_ids`` [T] int64; ``caches``: one layer's [N, 2, G, B, D] each, written and
        read at ``batch``'s slots and blocks -> hidden states [R, hidden] of its output rows, before the last
        norm."""
        ...


class Ops(Protocol):
    """Operations of a Llama-family decoder. Tensors are contiguous unless stated; results may be new or
    reused."""

    def pack_linear(
        self, weight: Tensor | BlockWeight, bias: Tensor | None, kind: Quantization | None = None
    ) -> LinearWeight:
        """``weight`` [O, I] and ``bias`` [O] in the layout that ``linear`` reads; rounded to ``kind``, see
        ``kernels.quantization``, unless they are blocks, which are taken as they are. ``ValueError`` for
        weights too large for that."""
        ...

    def linear(self, x: Tensor, weight: LinearWeight, dtype: torch.dtype | None = None) -> Tensor:
        """``x`` [T, I] -> [T, O], in ``dtype`` if that is given."""
        ...

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows ``token_ids`` [T] int64 of ``table`` [V, I] -> [T, I]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, statistics in float32 (Zhang and Sennrich, 2019)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``(rms_norm(x + residual), x + residual)``."""
        ...

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate ``q`` [T, H, D] and ``k`` [T, G, D], rotate-half pairing, by ``cos_sin`` [max positions, D]
        (first half cosines, second half sines, float32) (Su et al., 2021). Rows of ``q`` and ``k`` may be
        slices of wider ones; both may be overwritten."""
        ...

    def store_kv(self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Write ``k``, ``v`` [T, G, D] into one layer's ``cache`` [N, 2, G, B, D] (keys, then values; the
        block dimension may be strided) at ``slots`` [T], in the cache's type. Rows of ``k`` and ``v`` may be
        slices of wider ones. A cache of int8 has D + 4 in place of D: numbers, and a scale for each row."""
        ...

    def paged_attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, window: int
    ) -> Tensor:
        """Causal attention of ``q`` [T, H, D] over the sequences' blocks in ``cache`` [N, 2, G, B, D] -> [T,
        H, D]. Query head h reads key/value head h // (H / G). ``window`` > 0 limits a token to the last
        ``window`` positions, its own included; 0: no limit. Slots behind a sequence's last token are never
        read into a result: they may hold NaN."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``gate_up`` [T, 2 * I] (gate first) -> [T, I]."""
        ...

    def fuse(
        self,
        layers: Sequence[LayerWeights],
        embedding: Tensor,
        cos_sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
    ) -> Forward | None:
        """A whole step in one call, where the implementation has that: with ``embedding`` [V, hidden] in the
        type of activations and ``cos_sin`` [positions, D] float32."""
        ...


def select(device: torch.device, num_threads: int = 1, name: str = "auto") -> Ops:
    """The implementation for ``device``: on a CPU the kernels in C, computing with ``num_threads`` threads;
    on a GPU those in Triton; plain PyTorch where these are not to be had. ``name`` ("native", "triton",
    "torch") asks for one; then ``ValueError`` says why it is not to be had."""
    settle_vector_functions()
    torch.set_num_threads(num_threads)
    choice = ("native" if device.type == "cpu" else "triton") if name == "auto" else name
    try:
        return _load(choice, device, num_threads)
    except (ImportError, ValueError) as error:
        reason = str(error)
    if name != "auto":
        raise ValueError(f"{name} kernels are not to be had on {device}: {reason}")
    logger.warning("kernels: PyTorch, since %s kernels are not to be had: %s", choice, reason)
    return _load("torch", device, num_threads)


def settle_vector_functions() -> None:
    """Let oneMKL choose its code for them while nothing else computes. It chooses at the first call of each
    function, and of threads that make that call together one may get the coarsest code for its part: a table
    of cosines of which a half is off by 1e-4 (pytorch/pytorch#188792)."""
    for function in VECTOR_FUNCTIONS:
        function(torch.ones(1))


def _load(name: str, device: torch.device, num_threads: int) -> Ops:
    """Raises ``ImportError`` or ``ValueError`` with the reason why not."""
    if name == "torch":
        from kernels import cpu

        logger.info("kernels: PyTorch on %s", device)
        return cpu
    if name == "triton":
        from kernels import triton

        _require(triton.available(device))
        logger.info("kernels: Triton on %s%s", device, " (interpreted)" * triton.INTERPRETED)
        return triton
    from kernels import native

    _require(native.available() if device.type == "cpu" else "they are for CPUs")
    native.set_num_threads(num_threads)
    logger.info("kernels: C for %s, %d threads", native.instruction_set(), num_threads)
    return native


def _require(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)
