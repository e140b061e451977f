"""The decoder of the Llama family: what one step computes, in terms of ``kernels.Ops``.

Plain objects with tensors in them, made once; ``forward`` reads top to bottom as the paper's figure does
(Touvron et al., 2023). Differences between members of the family are ``ModelConfig``'s flags.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.config import Quantization
from common.linears import Linears
from common.model_config import ModelConfig
from common.rope import cos_sin_table
from common.weights import Weights
from kernels import AttentionBatch, LayerWeights, Ops


class Model:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
    ) -> None:
        assert (weights.dtype, weights.device) == (dtype, device), "weights are read as the model runs"
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.embedding = weights.read("model.embed_tokens.weight")
        linears = Linears(weights, ops, quantization)
        self.layers = [read_layer(config, weights, linears, layer) for layer in range(config.num_layers)]
        self.norm = weights.read("model.norm.weight")
        self.lm_head = linears.read(False, "model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        self.cos_sin = cos_sin_table(config, config.max_position_embeddings, device)
        self._fused = ops.fuse(
            self.layers,
            self.embedding,
            self.cos_sin,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
        )

    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: Sequence[Tensor]) -> Tensor:
        """``token_ids`` [T]; ``caches``: one layer's keys and values [N, 2, G, B, D] each, written and read
        at ``batch``'s slots and blocks -> hidden states [R, hidden] of its output rows, for ``logits``."""
        if self._fused is not None:
            return self._fused(token_ids, batch, caches)
        ops, eps = self.ops, self.config.rms_norm_eps
        residual = ops.embedding(token_ids, self.embedding)  # [T, hidden]
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            if index:
                x, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self.attention(layer, x, batch, caches[index])
            if batch.watch is not None:
                batch.watch.passed(index + 1, len(self.layers))
            if batch.output_rows is not None and layer is self.layers[-1]:
                x, residual = x[batch.output_rows], residual[batch.output_rows]
                if not len(x):
                    return x
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
        return x + residual

    def attention(self, layer: LayerWeights, x: Tensor, batch: AttentionBatch, cache: Tensor) -> Tensor:
        ops, config = self.ops, self.config
        num_heads, num_groups, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = ops.linear(x, layer.qkv).view(-1, num_heads + 2 * num_groups, head_dim)
        q, k, v = torch.split(heads, [num_heads, num_groups, num_groups], dim=1)  # [T, H or G, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = ops.rotary(q, k, batch.positions, self.cos_sin)
        ops.store_kv(k, v, cache, batch.slots)
        out = ops.paged_attention(q, cache, batch, head_dim**-0.5, layer.window)
        return ops.linear(out.view(-1, num_heads * head_dim), layer.o)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [S, hidden], rows of ``forward``'s result -> [S, vocabulary] float32."""
        normed = self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return self.ops.linear(normed, self.lm_head, torch.float32)


def read_layer(config: ModelConfig, weights: Weights, linears: Linears, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    return LayerWeights(
        input_norm=weights.read(f"{prefix}input_layernorm.weight"),
        qkv=linears.read(config.qkv_bias, *attention),
        q_norm=weights.read_if(config.qk_norm, f"{prefix}self_attn.q_norm.weight"),
        k_norm=weights.read_if(config.qk_norm, f"{prefix}self_attn.k_norm.weight"),
        o=linears.read(config.o_bias, f"{prefix}self_attn.o_proj"),
        mlp_norm=weights.read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linears.read(config.mlp_bias, f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"),
        down=linears.read(config.mlp_bias, f"{prefix}mlp.down_proj"),
        window=config.windows[index],
    )
