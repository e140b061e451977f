"""Times of kernels against their floors and against PyTorch's own, for one layer of a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu import timing
from benchmarks.gpu.agree import on
from benchmarks.gpu.costs import Cost, StepShape, attention, elementwise, linear
from benchmarks.gpu.steps import Shape, Step, make_step
from common.device_blocks import DeviceBlocks
from common.model_config import ModelConfig
from kernels import triton as gpu
from kernels.quantization import Quantization
from kernels.triton import blocks, sampling

BLOCK_SIZE = 16
BITS: dict[Quantization, float] = {"int8": 8 + 16 / 32, "int4": 4 + 32 / 32}  # a weight, its share of scales


@dataclass(frozen=True, slots=True)
class Timed:
    cost: Cost
    run: Callable[[], object]
    torch_run: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    rows: int  # tokens of a prefill
    context: int
    batch: int

    def pieces(self, bytes_per_s: float, flops_per_s: float) -> Iterator[Iterator[str]]:
        """Rows of a table: kernel, µs, floor µs, time over floor, PyTorch µs."""
        for timed in (self._rows, self._others, self._linears, self._attention):
            yield self._lines(timed(), bytes_per_s, flops_per_s)

    def _lines(self, kernels: Iterator[Timed], bytes_per_s: float, flops_per_s: float) -> Iterator[str]:
        for timed in kernels:
            taken = timing.seconds(timed.run, self.device)
            floor = timed.cost.seconds(bytes_per_s, flops_per_s)
            cells = [timed.cost.name, f"{taken * 1e6:,.1f}", f"{floor * 1e6:,.1f}", f"{taken / floor:.2f}"]
            if timed.torch_run is not None:
                cells.append(f"{timing.seconds(timed.torch_run, self.device) * 1e6:,.1f}")
            yield f"| {' | '.join(cells)} |{' |' * (5 - len(cells))}"

    def _step(self, sequences: list[tuple[int, int]]) -> Step:
        model = self.model
        sizes = (model.num_kv_heads, model.num_heads // model.num_kv_heads, model.head_dim, BLOCK_SIZE)
        return on(self.device, make_step(sequences, Shape(*sizes, self.dtype)))

    def _attention(self) -> Iterator[Timed]:
        shapes = [
            ("decode attention, batch 1", StepShape(1, 1, self.context)),
            (f"decode attention, batch {self.batch}", StepShape(self.batch, 1, self.context)),
            (f"prefill attention, {self.rows} tokens", StepShape(1, self.rows, self.rows)),
        ]
        for name, shape in shapes:
            step = self._step([(shape.num_new, shape.context)] * shape.num_sequences)
            yield Timed(
                attention(name, self.model, shape),
                partial(gpu.paged_attention, step.q, step.cache, step.batch, 0.1, 0),
                self._sdpa(shape),
            )

    def _sdpa(self, shape: StepShape) -> Callable[[], object]:
        """PyTorch's attention over keys and values that lie side by side already."""
        model = self.model
        kv = (shape.num_sequences, model.num_kv_heads, shape.context, model.head_dim)
        k, v = (torch.randn(kv, device=self.device).to(self.dtype) for _ in range(2))
        heads = (shape.num_sequences, model.num_heads, shape.num_new, model.head_dim)
        q = torch.randn(heads, device=self.device).to(self.dtype)
        causal = shape.num_new > 1
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.1, enable_gqa=True)

    def _rows(self) -> Iterator[Timed]:
        model, rows = self.model, self.rows
        x = torch.randn(rows, model.hidden_size, device=self.device).to(self.dtype)
        gate_up = torch.randn(rows, 2 * model.intermediate_size, device=self.device).to(self.dtype)
        step = self._step([(rows, rows)])
        cos_sin = torch.randn(rows, model.head_dim, device=self.device)
        k = step.q[:, : model.num_kv_heads]
        widths = model.head_dim * model.num_heads, model.head_dim * model.num_kv_heads
        yield Timed(
            elementwise(f"norm with residual, {rows} tokens", rows, 4 * model.hidden_size),
            lambda: gpu.add_rms_norm(x, x, x[0], 1e-5),
        )
        yield Timed(
            elementwise(f"rotary, {rows} tokens", rows, 2 * sum(widths)),
            lambda: gpu.rotary(step.q, k, step.batch.positions, cos_sin),
        )
        yield Timed(
            elementwise(f"store, {rows} tokens", rows, 4 * widths[1]),
            lambda: gpu.store_kv(k, k, step.cache, step.batch.slots),
        )
        yield Timed(
            elementwise(f"gate, {rows} tokens", rows, 3 * model.intermediate_size),
            lambda: gpu.silu_mul(gate_up),
        )

    def _linears(self) -> Iterator[Timed]:
        inputs, outputs = self.model.hidden_size, 2 * self.model.intermediate_size
        weight = torch.randn(outputs, inputs, device=self.device).to(self.dtype)
        for rows in (1, self.batch):
            x = torch.randn(rows, inputs, device=self.device).to(self.dtype)
            for kind, bits in BITS.items():
                packed = gpu.pack_linear(weight, None, kind)
                yield Timed(
                    linear(f"gate and up in {kind}, {rows} rows", rows, inputs, outputs, bits / 8),
                    partial(gpu.linear, x, packed),
                    partial(F.linear, x, weight),
                )

    def _others(self) -> Iterator[Timed]:
        model, count = self.model, max(2, self.rows // BLOCK_SIZE)
        rows = 2 * model.num_layers * model.num_kv_heads * BLOCK_SIZE
        cache = torch.randn(count, rows, model.head_dim, device=self.device).to(self.dtype)
        ids = torch.arange(count, device=self.device).flip(0)
        name = f"gather {count} blocks"
        yield Timed(
            elementwise(name, count * rows, 2 * model.head_dim),
            lambda: blocks.gather_blocks(cache, ids, self.dtype),
            lambda: cache.index_select(0, ids),
        )
        block = DeviceBlocks([cache[0].view(torch.uint8).flatten()])
        yield Timed(Cost("checksum of a block", block.tensors[0].nbytes), block.checksum)
        logits = torch.randn(self.batch, model.vocab_size, device=self.device)
        choice = torch.tensor([1.0, 0.0, 50, 0.9, 0.5], dtype=torch.float64, device=self.device)
        choices = choice.repeat(self.batch, 1)
        cost = Cost(f"draw, top-k and top-p, batch {self.batch}", 4.0 * logits.numel())
        yield Timed(cost, lambda: sampling.draw_each(logits, choices), lambda: logits.sort(-1))
