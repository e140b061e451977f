"""Weights of a checkpoint, one tensor at a time, under the names of Hugging Face's Llama family.

``load`` compares every name, shape and type with what the configuration asks for before anything is read: a
file that does not fit is refused by name before a worker serves. ``Weights.read`` then reads and converts one
tensor, so that a model being built never takes much more memory than itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.gguf_weights import GgufCheckpoint
from common.model_config import ModelConfig, ModelError
from common.model_source import ModelFiles
from common.safetensors_weights import SafetensorsCheckpoint
from kernels.quantization import BlockFormat, BlockWeight

Shape = tuple[int, ...]
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # some older checkpoints carry what is computed here


class Checkpoint(Protocol):
    """Files that tensors come from; opening one raises ``ModelError`` for a damaged file or an unsupported
    type."""

    @property
    def shapes(self) -> dict[str, Shape]: ...

    def read_into(self, name: str, target: Tensor) -> None:
        """Convert the tensor to the type of ``target``, which has its shape."""
        ...

    def read_blocks(self, name: str) -> tuple[BlockFormat, Tensor] | None:
        """The matrix as whole numbers with a scale per block, [rows, bytes], where it is kept so."""
        ...

    def file_of(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Weights:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def read(self, *names: str) -> Tensor:
        """The tensors, one below the other, in memory of their own."""
        shapes = [self.checkpoint.shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(whole, rows), strict=True):
            self.checkpoint.read_into(name, part)
        return whole

    def read_blocks(self, *names: str) -> BlockWeight | None:
        """The matrices, one below the other, where all are blocks of one format."""
        parts = [part for name in names if (part := self.checkpoint.read_blocks(name)) is not None]
        formats = {part[0] for part in parts}
        if len(parts) < len(names) or len(formats) != 1:
            return None
        return BlockWeight(torch.cat([part[1] for part in parts]).to(self.device), formats.pop(), self.dtype)

    def read_if(self, present: bool, *names: str) -> Tensor | None:
        return self.read(*names) if present else None


def load(files: ModelFiles, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """``ModelError`` naming the tensor that is missing, unknown, of the wrong shape or of an unsupported
    type."""
    gguf = files.weights[0].suffix == ".gguf"
    checkpoint: Checkpoint
    if gguf:
        checkpoint = GgufCheckpoint(files.weights[0], files.directory / "tensors.json", config)
    else:
        checkpoint = SafetensorsCheckpoint(files.weights)
    compare(
        checkpoint, dict(expected_shapes(config)), config.tie_word_embeddings, str(files.weights[0].parent)
    )
    return Weights(checkpoint, dtype, device)


def compare(checkpoint: Checkpoint, expected: dict[str, Shape], tied: bool, directory: str) -> None:
    found = checkpoint.shapes
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{directory}: tensor {name} is missing")
        if found[name] != shape:
            where = checkpoint.file_of(name)
            raise ModelError(f"{where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    for name in found:
        harmless = name.endswith(IGNORED_SUFFIX) or (tied and name == "lm_head.weight")
        if name not in expected and not harmless:
            where = checkpoint.file_of(name)
            raise ModelError(f"{where}: tensor {name} belongs to a feature that is not supported")


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape


def layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, head_dim, wide = config.hidden_size, config.head_dim, config.intermediate_size
    query, key_value = config.num_heads * head_dim, config.num_kv_heads * head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.v_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.o_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    for name, (out_features, in_features, bias) in linears.items():
        yield f"{name}.weight", (out_features, in_features)
        if bias:
            yield f"{name}.bias", (out_features,)
