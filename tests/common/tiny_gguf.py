"""Tiny models as GGUF files, laid out as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from common.gguf_weights import hugging_face_name
from common.model_config import ModelConfig
from tests.common import tiny_models

STEMS = [
    *("token_embd", "output_norm", "output"),
    *(
        f"blk.{layer}.attn_{part}"
        for layer in range(3)
        for part in ("norm", "q", "k", "v", "output", "q_norm", "k_norm")
    ),
    *(f"blk.{layer}.ffn_{part}" for layer in range(3) for part in ("norm", "gate", "up", "down")),
]
GGUF_NAMES = {
    hugging_face_name(f"{stem}.{kind}"): f"{stem}.{kind}" for stem in STEMS for kind in ("weight", "bias")
}


def write(
    path: Path,
    config: ModelConfig,
    types: dict[str, str] | None = None,
    leave_out: tuple[str, ...] = (),
    **metadata: Any,
) -> Path:
    """``types``: tensor type by the ending of the GGUF name, F32 otherwise. ``metadata``: keys with ``__``
    for the dot, in place of the model's own; None leaves one out."""
    arch = "llama" if config.family == "mistral" else config.family
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (model_metadata(arch, config) | tokenizer_metadata(config.vocab_size)).items():
        add(writer, key, metadata.pop(key.replace(".", "__"), value))
    for key, value in metadata.items():
        add(writer, key.replace("__", "."), value)
    for name, tensor in tiny_models.tensors(config).items():
        stored = GGUF_NAMES[name]
        if stored not in leave_out:
            kind = next((kind for ending, kind in (types or {}).items() if stored.endswith(ending)), "F32")
            add_tensor(writer, stored, pair_neighbours(stored, tensor.numpy(), arch, config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_metadata(arch: str, config: ModelConfig) -> dict[str, Any]:
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
    }


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<end>", *(chr(0x61 + index) for index in range(vocab_size - 1))],
        "tokenizer.ggml.token_type": [3] + [1] * (vocab_size - 1),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_array(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        writer.add_tensor(name, values.astype({"F32": np.float32, "F16": np.float16}[kind]))
        return
    data = blocks(values.shape, kind) if kind in ("Q4_K", "Q6_K") else gguf.quantize(values, quantisation)
    writer.add_tensor(name, data, raw_dtype=quantisation)


def blocks(shape: tuple[int, ...], kind: str) -> NDArray[np.uint8]:
    """Quantised data of a type that the library reads but does not write: anything but for finite scales."""
    size, scales = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}[kind]
    count = int(np.prod(shape)) // 256
    data = np.random.default_rng(1).integers(0, 256, (count, size), dtype=np.uint8)
    for at in scales:
        data[:, at : at + 2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    return data.reshape(shape[0], -1)


def pair_neighbours(name: str, values: NDArray[Any], arch: str, config: ModelConfig) -> NDArray[Any]:
    """llama.cpp's converter puts the two rows that the rotary embedding turns together side by side."""
    if arch != "llama" or not any(part in name for part in ("attn_q.", "attn_k.")):
        return values
    by_half = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(values.shape))
