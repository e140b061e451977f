"""What the kernels of a step must move and compute, whoever writes them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one kind of kernel in a step, all its launches together."""

    name: str
    num_bytes: float  # between memory and processors, each thing once
    flops: float = 0.0  # multiplications and additions in matrix products

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """At least: moving and computing at the same time."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)

    def times(self, count: int) -> "Cost":
        return replace(self, num_bytes=count * self.num_bytes, flops=count * self.flops)


@dataclass(frozen=True, slots=True)
class StepShape:
    """``num_sequences`` sequences with ``num_new`` new tokens each, the last of ``context`` tokens."""

    num_sequences: int
    num_new: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_new


def linear(name: str, rows: int, inputs: int, outputs: int, weight_bytes: float = 2.0) -> Cost:
    """``weight_bytes`` per weight; activations in 16 bits."""
    moved = inputs * outputs * weight_bytes + 2.0 * rows * (inputs + outputs)
    return Cost(name, moved, 2.0 * rows * inputs * outputs)


def attention(name: str, model: ModelConfig, step: StepShape) -> Cost:
    """Each query meets all keys up to its own."""
    kv = 2 * 2.0 * model.num_kv_heads * model.head_dim * step.context * step.num_sequences
    rows = 2 * 2.0 * step.num_tokens * model.num_heads * model.head_dim
    pairs = step.num_tokens * (step.context - (step.num_new - 1) / 2)
    return Cost(name, kv + rows, 4.0 * pairs * model.num_heads * model.head_dim)


def elementwise(name: str, rows: int, values_per_row: float) -> Cost:
    """Kernels that move values of 16 bits: ``values_per_row`` read and written together."""
    return Cost(name, 2.0 * rows * values_per_row)


def layer_costs(model: ModelConfig, step: StepShape) -> Iterator[Cost]:
    rows, hidden, wide = step.num_tokens, model.hidden_size, model.intermediate_size
    heads, kv_heads = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    yield elementwise("norms with residual", rows, 2 * 4 * hidden)
    yield linear("q, k, v", rows, hidden, heads + kv_heads)
    yield elementwise("rotary", rows, 2 * (heads + kv_heads / 2))
    yield elementwise("store keys and values", rows, 2 * kv_heads)
    yield attention("attention", model, step)
    yield linear("output of attention", rows, heads, hidden)
    yield linear("gate and up", rows, hidden, 2 * wide)
    yield elementwise("gate", rows, 3 * wide)
    yield linear("down", rows, wide, hidden)


def step_costs(model: ModelConfig, step: StepShape) -> list[Cost]:
    """Of all layers, the logits of each sequence's last token, and drawing from them."""
    found = [cost.times(model.num_layers) for cost in layer_costs(model, step)]
    found.append(linear("logits", step.num_sequences, model.hidden_size, model.vocab_size))
    # A maximum, a sum and a draw; what top-k and top-p read beyond that stays in the cache of the GPU.
    found.append(Cost("draw", 4.0 * step.num_sequences * model.vocab_size))
    return found
