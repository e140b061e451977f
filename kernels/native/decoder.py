"""A whole step in one call into the library: what ``common.model`` does operation by operation, without the
interpreter in between. Results are as batch-invariant as the operations are, and closer to float32 than
theirs in 16-bit types, for the residual stream stays in float32."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import AttentionBatch, LayerWeights
from kernels.native import library
from kernels.native.library import DTYPES, Attention, Rows


class Decoder:
    def __init__(
        self,
        layers: Sequence[LayerWeights],
        embedding: Tensor,
        cos_sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
    ) -> None:
        """``embedding`` [V, hidden] gives the type of activations; ``cos_sin`` [positions, D] float32."""
        assert embedding.is_contiguous() and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
        self._kept = (layers, embedding, cos_sin)  # the library sees addresses only
        self._library = library.load()
        self._shape = (num_heads, num_kv_heads, head_dim)
        self._layers = (library.Layer * len(layers))(*(describe(layer) for layer in layers))
        self._fields = library.Decoder(
            self._layers,
            embedding.data_ptr(),
            cos_sin.data_ptr(),
            embedding.shape[1],
            len(layers),
            num_heads,
            num_kv_heads,
            head_dim,
            DTYPES[embedding.dtype],
            eps,
        )

    def __call__(self, token_ids: Tensor, batch: AttentionBatch, caches: Sequence[Tensor]) -> Tensor:
        """``token_ids`` [T] int64; ``caches``: one layer's [N, 2, G, B, D] each, all of one type and one
        stride, written and read at ``batch``'s slots and blocks -> hidden states [R, hidden] of its output
        rows."""
        embedding, first = self._kept[1], caches[0]
        num_heads, num_kv_heads, head_dim = self._shape
        assert (
            first[0].is_contiguous() and first.shape[2] == num_kv_heads and len(caches) == len(self._layers)
        )
        rows = batch.output_rows
        out = embedding.new_empty(len(token_ids if rows is None else rows), embedding.shape[1])
        tables = batch.block_tables
        attention = Attention(
            Rows(),
            Rows(),
            None,
            first.stride(0),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            tables.shape[0],
            num_heads,
            num_kv_heads,
            head_dim,
            first.shape[3],
            0,
            DTYPES[first.dtype],
            head_dim**-0.5,
        )
        places = (ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
        watch = batch.watch
        step = library.Step(
            token_ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            token_ids.shape[0],
            places,
            attention,
            rows.data_ptr() if rows is not None else None,
            len(out),
            out.data_ptr(),
            library.TELL(watch.tell) if watch is not None else library.TELL(),
            watch.every if watch is not None else 0,
        )
        self._library.baton_forward(self._fields, step)
        return out


def describe(layer: LayerWeights) -> library.Layer:
    def place(tensor: Tensor | None) -> int | None:
        assert tensor is None or tensor.is_contiguous()
        return None if tensor is None else tensor.data_ptr()

    return library.Layer(
        place(layer.input_norm),
        place(layer.mlp_norm),
        place(layer.q_norm),
        place(layer.k_norm),
        *(weight.data[0].data_ptr() for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)),
        layer.window,
    )
