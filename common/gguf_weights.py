"""Tensors in a GGUF file, dequantised, under the names and in the order of rows that Hugging Face checkpoints
have."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.model_config import ModelConfig, ModelError, read_json
from kernels.quantization import BLOCK_BYTES, BlockFormat, BlockWeight

if TYPE_CHECKING:
    import numpy as np

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
PIECE_ELEMENTS = 1 << 22  # dequantised at a time: bounds the float32 copy
IGNORED = ("rope_freqs.weight",)  # in the configuration already

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    def __init__(self, path: Path, index: Path, config: ModelConfig) -> None:
        """``index``: tensors.json of the file's export. ``ModelError`` for a truncated file or a type not
        supported."""
        self.path = path
        self.config = config
        self.entries = {
            hugging_face_name(name): entry for name, entry in read_json(index).items() if name not in IGNORED
        }
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self.entries.items()}
        size = path.stat().st_size
        for name, entry in self.entries.items():
            if entry["type"] not in (*PLAIN_TYPES, *QUANTISED_TYPES):
                supported = ", ".join((*PLAIN_TYPES, *QUANTISED_TYPES))
                raise ModelError(f"{path}: tensor {name} has type {entry['type']}; supported: {supported}")
            if entry["offset"] + entry["num_bytes"] > size:
                raise ModelError(f"{path}: truncated: tensor {name} lies beyond the end of the file")

    def file_of(self, name: str) -> str:
        return str(self.path)

    def read_into(self, name: str, target: Tensor) -> None:
        order = self.row_order(name, target.shape[0])
        for rows, values in self.pieces(self.entries[name]):
            target[rows if order is None else order[rows]] = values.to(target)

    def read_blocks(self, name: str) -> tuple[BlockFormat, Tensor] | None:
        """A matrix as the file holds it, [rows, bytes], where the kernels know that format."""
        entry = self.entries[name]
        if entry["type"] not in BLOCK_BYTES or len(entry["shape"]) != 2:
            return None
        stored = torch.from_numpy(self.stored_rows(entry, entry["shape"][0]).copy())
        order = self.row_order(name, entry["shape"][0])
        if order is not None:
            stored = torch.empty_like(stored).index_copy_(0, order, stored)
        return entry["type"], stored

    def pieces(self, entry: dict[str, Any]) -> Iterator[tuple[slice, Tensor]]:
        """The tensor's rows (elements, if it is a vector), some at a time."""
        shape = entry["shape"] if len(entry["shape"]) > 1 else [1, *entry["shape"]]
        stored = self.stored_rows(entry, shape[0])
        step = max(1, PIECE_ELEMENTS // shape[1])
        for start in range(0, shape[0], step):
            values = values_of(entry["type"], torch.from_numpy(stored[start : start + step].copy()))
            if len(entry["shape"]) == 1:
                yield slice(0, shape[1]), values[0]
            else:
                yield slice(start, start + step), values

    def stored_rows(self, entry: dict[str, Any], num_rows: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The tensor's bytes, [rows, bytes per row], not read yet."""
        import numpy as np

        shape = (num_rows, entry["num_bytes"] // num_rows)
        return np.memmap(self.path, dtype=np.uint8, mode="r", offset=entry["offset"], shape=shape)

    def row_order(self, name: str, num_rows: int) -> Tensor | None:
        """Where each stored row belongs. GGUF files of Llama models pair neighbouring rows of a head for the
        rotary embedding; here, as in Hugging Face's checkpoints, a row's partner is half a head away."""
        if self.config.family not in ("llama", "mistral") or not re.search(r"\.(q|k)_proj\.", name):
            return None
        half = self.config.head_dim // 2
        place = torch.arange(num_rows).view(-1, 2, half)  # [heads, which of the pair, pair]
        return place.transpose(1, 2).reshape(-1)


def values_of(kind: str, rows: Tensor) -> Tensor:
    """What ``rows``, [R, bytes], hold.

    Models are trained and published in bfloat16, and what quantisation left of a weight is no more exact than
    that: rounded to it, a weight is the same number whether the model is then run in bfloat16 or in float32,
    and the same as in implementations that keep dequantised weights in bfloat16."""
    if kind in PLAIN_TYPES:
        return rows.view(PLAIN_TYPES[kind])
    if kind in BLOCK_BYTES:  # far faster than the library
        return BlockWeight(rows, kind, torch.bfloat16).values()
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind])).bfloat16()


def hugging_face_name(name: str) -> str:
    """A name not known stays as it is, and is refused later by that name."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name
