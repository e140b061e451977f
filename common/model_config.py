"""What the decoder must know about a model, read from the ``config.json`` of a Hugging Face model directory.

One decoder serves the Llama family; the differences between its members are flags here. What the decoder does
not do (another architecture, experts, quantised checkpoints, another activation or rope) is refused by name,
so that no model is ever served with a feature silently left out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3", "factors")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class ModelError(ValueError):
    """A model that cannot be served; the text names the file, tensor, architecture or feature."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies differ from the plain ones; see ``common.rope``."""

    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()  # one divisor per frequency, as GGUF files carry them


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int, ...]  # per layer: positions a token sees, its own included; 0: all
    dtype: str  # the type the weights were saved in
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, directory: Path) -> "ModelConfig":
        """Read ``config.json`` and, where there is one, ``generation_config.json`` (which often names more
        ends)."""
        source = Source("config.json", read_json(directory / "config.json"))
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return parse(source, generation)


@dataclass(frozen=True, slots=True)
class Source:
    """A JSON object whose fields are read with their type checked and their name in the error."""

    name: str
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.name}: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"{self.name}: {key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.name}: {key} must be true or false, not {value!r}")
        return value

    def object(self, key: str) -> "Source":
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{self.name}: {key} must be an object, not {value!r}")
        return Source(f"{self.name}: {key}", value or {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; ``ModelError`` naming the file when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object was expected")
    return value


def parse(source: Source, generation: Mapping[str, Any]) -> ModelConfig:
    family = find_family(source)
    refuse_unsupported(source)
    num_heads = source.integer("num_attention_heads")
    num_kv_heads = source.integer("num_key_value_heads", num_heads)
    hidden_size = source.integer("hidden_size")
    head_dim = source.integer("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{source.name}: {num_heads} heads cannot share {num_kv_heads} key/value heads evenly"
        )
    if head_dim % 2:
        raise ModelError(f"{source.name}: head_dim must be even, not {head_dim}")
    attention_bias = family in ("llama", "qwen3") and source.flag("attention_bias", False)
    num_layers = source.integer("num_hidden_layers")
    return ModelConfig(
        family=family,
        vocab_size=source.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=source.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        max_position_embeddings=source.integer("max_position_embeddings"),
        rope_theta=parse_rope_theta(source),
        rope_scaling=parse_rope_scaling(source, head_dim),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and source.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        tie_word_embeddings=source.flag("tie_word_embeddings", False),
        windows=parse_windows(source, family, num_layers),
        dtype=parse_dtype(source),
        bos_token_id=parse_bos(source.values),
        eos_token_ids=parse_eos(source.values, generation),
    )


def find_family(source: Source) -> Family:
    names = source.values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{source.name}: architectures must be a list of names, not {names!r}")
    model_type = source.values.get("model_type")
    for name, family in ARCHITECTURES.items():
        if name in names or (not names and model_type == family):
            return family
    found = ", ".join(names) or f"model_type {model_type!r}"
    raise ModelError(
        f"{source.name}: unsupported architecture {found}; supported: {', '.join(ARCHITECTURES)}"
    )


def refuse_unsupported(source: Source) -> None:
    values = source.values
    for key in ("quantization_config", "compression_config"):
        if values.get(key):
            method = (
                values[key].get("quant_method", "unnamed") if isinstance(values[key], dict) else values[key]
            )
            raise ModelError(
                f"{source.name}: {key} (method {method}) is not supported: use an unquantised checkpoint"
            )
    for key in EXPERT_COUNTS:
        if values.get(key):
            raise ModelError(f"{source.name}: mixture of experts ({key} = {values[key]}) is not supported")
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{source.name}: hidden_act {activation!r} is not supported, only silu")
    rotary = values.get("partial_rotary_factor", rope_values(source).values.get("partial_rotary_factor"))
    if rotary not in (None, 1, 1.0):
        raise ModelError(f"{source.name}: partial_rotary_factor {rotary!r} is not supported, only 1")


def rope_values(source: Source) -> Source:
    """Rope settings, under the name newer (``rope_parameters``) or older (``rope_scaling``) checkpoints
    use."""
    newer = source.object("rope_parameters")
    return newer if newer.values else source.object("rope_scaling")


def parse_rope_theta(source: Source) -> float:
    rope = rope_values(source)
    return rope.number("rope_theta") if "rope_theta" in rope.values else source.number("rope_theta", 10000.0)


def parse_rope_scaling(source: Source, head_dim: int) -> RopeScaling:
    rope = rope_values(source)
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"{rope.name}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if kind == "linear":
        return RopeScaling("linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
    if kind == "factors":
        factors = tuple(float(value) for value in rope.values.get("factors", ()))
        if len(factors) != head_dim // 2 or not all(value > 0 for value in factors):
            raise ModelError(f"{rope.name}: factors must be {head_dim // 2} positive numbers")
        return RopeScaling("factors", factors=factors)
    return RopeScaling()


def parse_windows(source: Source, family: Family, num_layers: int) -> tuple[int, ...]:
    values = source.values
    used = family == "mistral" or (family in ("qwen2", "qwen3") and source.flag("use_sliding_window", False))
    if not used or not values.get("sliding_window"):
        return (0,) * num_layers
    window = source.integer("sliding_window")
    if values.get("layer_types"):
        return windows_by_type(source, window, num_layers)
    first = 0 if family == "mistral" else source.integer("max_window_layers", num_layers)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def windows_by_type(source: Source, window: int, num_layers: int) -> tuple[int, ...]:
    sizes = {"full_attention": 0, "sliding_attention": window}
    types = source.values["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers or not all(name in sizes for name in types):
        raise ModelError(f"{source.name}: layer_types must name {num_layers} of {', '.join(sizes)}")
    return tuple(sizes[name] for name in types)


def parse_dtype(source: Source) -> str:
    name = source.values.get("dtype") or source.values.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"{source.name}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return str(name)


def parse_bos(values: Mapping[str, Any]) -> int | None:
    bos = values.get("bos_token_id")
    return bos if isinstance(bos, int) else None


def parse_eos(values: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for named in (values.get("eos_token_id"), generation.get("eos_token_id")):
        found = named if isinstance(named, list) else [named]
        ids += [token for token in found if isinstance(token, int) and token not in ids]
    return tuple(ids)
