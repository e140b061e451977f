"""Models by their shape alone, with weights drawn at random: how fast a model is does not depend on what it
says."""

import torch
from torch import Tensor

from common.model import Model
from common.model_config import ModelConfig, RopeScaling
from common.weights import Shape, Weights, expected_shapes
from kernels import Ops
from kernels.quantization import BlockFormat, Quantization


def llama(
    hidden: int, wide: int, layers: int, heads: int, groups: int, head_dim: int, vocab: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=wide,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=tied,
        windows=(0,) * layers,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_ids=(),
    )


LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128, 128_256, tied=False)
LLAMA_1B = llama(2048, 8192, 16, 32, 8, 64, 128_256, tied=True)
TINY = llama(32, 48, 2, 4, 2, 16, 64, tied=True)


class RandomCheckpoint:
    """Every tensor that the model asks for; the same ones each time."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = dict(expected_shapes(config))

    @property
    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    def read_into(self, name: str, target: Tensor) -> None:
        generator = torch.Generator(target.device).manual_seed(len(name) + sum(name.encode()))
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:  # activations stay near 1, whatever the width
            target.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)

    def read_blocks(self, name: str) -> tuple[BlockFormat, Tensor] | None:
        return None

    def file_of(self, name: str) -> str:
        return "random numbers"


def build(
    config: ModelConfig,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
) -> Model:
    weights = Weights(RandomCheckpoint(config), dtype, device)
    return Model(config, weights, ops, dtype, device, quantization or "none")
