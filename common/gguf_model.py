"""A GGUF file as a Hugging Face model directory.

``export`` writes config.json, tokenizer.json, tokenizer_config.json and tensors.json (where each tensor lies
in the file) once per file, so that a process that starts later neither parses the metadata (seconds, and
hundreds of MiB, as each of 50,000 token strings becomes an array) nor needs the ``gguf`` package to find a
tensor. ``python -m common.gguf_model FILE DIRECTORY`` does it in a process of its own, whose memory goes when
it ends.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import gguf_tokenizer
from common.model_config import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Metadata:
    """Key/value pairs of a GGUF file; ``arch.`` in a key stands for the architecture's own prefix."""

    def __init__(self, path: Path, reader: "GGUFReader") -> None:
        self.path = path
        self.reader = reader
        self.read: dict[str, Any] = {}  # a vocabulary takes a while to turn into strings
        self.architecture = str(self.get("general.architecture"))
        self.tensor_types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key.removeprefix('arch.')}" if key.startswith("arch.") else key

    def get(self, key: str, default: Any = None) -> Any:
        key = self.full(key)
        if key not in self.read:
            field = self.reader.get_field(key)
            self.read[key] = None if field is None else field.contents()
        return default if self.read[key] is None else self.read[key]

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {self.full(key)} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Some models have a number per layer here; those that can be served are alike in all layers."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.path}: {self.full(key)} must be one positive integer, not {value!r}")
        return value


def open_metadata(path: Path) -> Metadata:
    """Raises ``ModelError`` for a file that is no GGUF file, is cut short or is one of several parts."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise ModelError(f"{path}: not a complete GGUF file: {error}") from error
    metadata = Metadata(path, reader)
    if reader.byte_order != "I":
        raise ModelError(f"{path}: written for the other byte order")
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{path}: one part of a split GGUF file; merge the parts first (gguf-split --merge)")
    if metadata.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{path}: unsupported architecture {metadata.architecture!r}; supported: {supported}"
        )
    return metadata


def model_json(metadata: Metadata) -> dict[str, Any]:
    """The model's config.json."""
    llama = metadata.architecture == "llama"
    window = metadata.get("arch.attention.sliding_window") if llama else None
    num_heads = metadata.integer("arch.attention.head_count")
    hidden_size = metadata.integer("arch.embedding_length")
    head_dim = metadata.integer("arch.attention.key_length", max(1, hidden_size // num_heads))
    if metadata.get("arch.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{metadata.path}: rotary embedding of a part of each head is not supported")
    if metadata.get("arch.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{metadata.path}: heads whose values are wider than their keys are not supported")
    return {
        "architectures": ["MistralForCausalLM" if window else ARCHITECTURES[metadata.architecture]],
        "vocab_size": len(metadata.require("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("arch.feed_forward_length"),
        "num_hidden_layers": metadata.integer("arch.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("arch.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.require("arch.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("arch.context_length"),
        "rope_theta": metadata.get("arch.rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(metadata),
        "sliding_window": window,
        "tie_word_embeddings": "output.weight" not in metadata.tensor_types,
        "attention_bias": llama and "blk.0.attn_q.bias" in metadata.tensor_types,
        "num_experts": metadata.get("arch.expert_count", 0),
        "dtype": saved_dtype(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf_tokenizer.end_token_ids(metadata.get),
    }


def saved_dtype(metadata: Metadata) -> str:
    """The type to compute with where nobody says otherwise; weights come out of quantisation in bfloat16."""
    kind = metadata.tensor_types.get("blk.0.attn_q.weight", "")
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Llama 3's scaling comes as a tensor of divisors, the others as a name and a factor."""
    for tensor in metadata.reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return {"rope_type": "factors", "factors": [float(value) for value in tensor.data]}
    older = metadata.get("arch.rope.scale_linear")
    kind = metadata.get("arch.rope.scaling.type", "linear" if older else "none")
    factor = metadata.get("arch.rope.scaling.factor", older or 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    return {"rope_type": kind, "factor": factor}


def tensor_index(metadata: Metadata) -> dict[str, Any]:
    """By name: quantisation type, shape as PyTorch counts it, offset and size in bytes."""
    return {
        tensor.name: {
            "type": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "num_bytes": int(tensor.n_bytes),
        }
        for tensor in metadata.reader.tensors
    }


def export(path: Path, directory: Path) -> None:
    metadata = open_metadata(path)
    files = {
        "config.json": model_json(metadata),
        "tensors.json": tensor_index(metadata),
        "tokenizer.json": gguf_tokenizer.tokenizer_json(metadata.get, str(path)),
        "tokenizer_config.json": gguf_tokenizer.tokenizer_config_json(metadata.get),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    try:
        export(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
