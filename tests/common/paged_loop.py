"""The smallest engine that a model can be tried with: one sequence, its blocks scattered over a cache."""

import torch
from torch import Tensor

from common.model import Model
from kernels import AttentionBatch, Watch

BLOCK_SIZE = 16


class PagedLoop:
    def __init__(self, model: Model, num_blocks: int) -> None:
        config = model.config
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        cache = torch.full(shape, torch.nan, dtype=model.dtype)  # what was not written must not be read
        self.model = model
        self.caches = [cache[:, layer] for layer in range(config.num_layers)]
        self.table = torch.arange(num_blocks).flip(0)
        self.num_computed = 0

    def compute(
        self, token_ids: list[int], watch: Watch | None = None, output_rows: Tensor | None = None
    ) -> Tensor:
        """The next tokens of the sequence -> logits [len(token_ids), vocabulary], or of some rows."""
        start, end = self.num_computed, self.num_computed + len(token_ids)
        positions = torch.arange(start, end)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=self.table[None].int(),
            slots=self.table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            positions=positions,
            max_query_len=len(token_ids),
            max_context_len=end,
            output_rows=output_rows,
            watch=watch,
        )
        self.num_computed = end
        with torch.inference_mode():
            return self.model.logits(self.model.forward(torch.tensor(token_ids), batch, self.caches))


def generate(model: Model, prompt: list[int], num_tokens: int, chunk: int = 512) -> list[int]:
    """Greedy continuation."""
    loop = PagedLoop(model, num_blocks=-(-(len(prompt) + num_tokens) // BLOCK_SIZE))
    logits = [loop.compute(prompt[start : start + chunk])[-1] for start in range(0, len(prompt), chunk)]
    token_ids = [int(logits[-1].argmax())]
    while len(token_ids) < num_tokens:
        token_ids.append(int(loop.compute(token_ids[-1:])[-1].argmax()))
    return token_ids
