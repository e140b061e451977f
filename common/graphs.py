"""Recorded decode steps for GPUs.

A decode step is some hundred short kernels; launching them one by one from Python takes longer than they do.
So the launches of a step with a token for each of 1, 2, 4, ... sequences are recorded once, with their inputs
at fixed places, and replayed as one. A step of another size takes the next larger record and fills it up with
sequences of one token that live in a block of their own. Steps with longer parts of prompts are not recorded:
there the kernels take longer than their launches.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from common.sampler import SamplingOps
from kernels import AttentionBatch

SHORT_PROMPT = 64  # tokens: attention chooses its tiles for short and for long prompts
Step = Callable[[], Tensor]
Record = Callable[[Step], Step]  # from a computation to its replay


class Recordable(Protocol):
    """A model whose ``forward`` waits for nothing on the device."""

    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class RecordedModel:
    """A language model for an engine, in front of another one. All calls must come from one thread."""

    def __init__(
        self,
        model: Recordable,
        caches: list[Tensor],
        spare_block: int,
        max_num_seqs: int,
        max_model_len: int,
        record: Record,
    ) -> None:
        """Records at once. ``spare_block`` of ``caches`` belongs to nobody else."""
        self._model = model
        self._caches = caches
        self._inputs = Inputs(max_num_seqs, max_model_len, spare_block, caches[0])
        self._replays = {size: self._recorded(size, record) for size in reversed(sizes(max_num_seqs))}

    def _recorded(self, size: int, record: Record) -> Step:
        """The largest come first: the others then fit into the memory that it took."""
        token_ids, batch = self._inputs.of(size)
        return record(lambda: self._model.forward(token_ids, batch, self._caches))

    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
        num_tokens = len(token_ids)
        size = next((size for size in sorted(self._replays) if size >= num_tokens), None)
        if batch.max_query_len > 1 or size is None:
            return self._model.forward(token_ids, batch, caches)
        self._inputs.fill(token_ids, batch, size)
        hidden = self._replays[size]()[:num_tokens]
        return hidden if batch.output_rows is None else hidden[batch.output_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def warm_up(
    model: Recordable,
    caches: list[Tensor],
    spare_block: int,
    num_tokens: int,
    max_num_seqs: int,
    sampling: SamplingOps,
) -> None:
    """Compute steps of every kind that is not recorded, all in ``spare_block``, and draw a token, so that
    kernels are compiled and tuned before the first request comes: prompts of up to ``num_tokens`` tokens, and
    any number of sequences some of which have several new tokens."""
    lens = [[num_tokens], [min(num_tokens, SHORT_PROMPT)]]
    lens += [[2] + [1] * (size - 1) for size in sizes(max_num_seqs)]
    for query_lens in lens:
        hidden = model.forward(*prompts_in(spare_block, query_lens, caches[0]), caches)
        logits = model.logits(hidden[: len(query_lens)])
    ones, token_ids = torch.ones_like(logits[:1, 0]), torch.zeros_like(hidden[:1, 0], dtype=torch.int64)
    sampling.penalize(logits[:1], token_ids, token_ids.int(), token_ids > 0, ones, ones, ones)
    sampling.draw([logits[0]], [(1.0, 0.0, 0, 1.0, 0.5)])


def prompts_in(block: int, query_lens: list[int], cache: Tensor) -> tuple[Tensor, AttentionBatch]:
    """Token ids and batch of a step with so many tokens of each sequence, all of them first ones, which
    overwrite each other in ``block``."""
    device, block_size = cache.device, cache.shape[3]
    lens = torch.tensor(query_lens, dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(count, device=device) for count in query_lens])
    shape = len(query_lens), -(-max(query_lens) // block_size)
    return torch.zeros_like(positions), AttentionBatch(
        query_starts=torch.cat([torch.zeros_like(lens[:1]), lens.cumsum(0, dtype=torch.int32)]),
        context_lens=lens,
        block_tables=torch.full(shape, block, dtype=torch.int32, device=device),
        slots=block * block_size + positions % block_size,
        positions=positions,
        max_query_len=max(query_lens),
        max_context_len=max(query_lens),
    )


class Inputs:
    """The places from which recorded steps read what they compute: one token of each sequence."""

    def __init__(self, max_num_seqs: int, max_model_len: int, spare_block: int, cache: Tensor) -> None:
        device, block_size = cache.device, cache.shape[3]
        size, width = sizes(max_num_seqs)[-1], -(-max_model_len // block_size)
        self._max_model_len = max_model_len
        self._spare_block = spare_block
        self._spare_slot = spare_block * block_size
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.context_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.block_tables = torch.full((size, width), spare_block, dtype=torch.int32, device=device)
        self.slots = torch.full((size,), self._spare_slot, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)

    def of(self, size: int) -> tuple[Tensor, AttentionBatch]:
        """The first ``size`` sequences."""
        return self.token_ids[:size], AttentionBatch(
            query_starts=self.query_starts[: size + 1],
            context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size],
            slots=self.slots[:size],
            positions=self.positions[:size],
            max_query_len=1,
            max_context_len=self._max_model_len,
        )

    def fill(self, token_ids: Tensor, batch: AttentionBatch, size: int) -> None:
        """Put a step's sequences first and spare ones behind them, up to ``size``."""
        count, width = batch.block_tables.shape
        self.token_ids[:count].copy_(token_ids)
        self.context_lens[:count].copy_(batch.context_lens)
        self.block_tables[:count, :width].copy_(batch.block_tables)
        self.slots[:count].copy_(batch.slots)
        self.positions[:count].copy_(batch.positions)
        if count < size:
            self.context_lens[count:size] = 1
            self.block_tables[count:size, 0] = self._spare_block
            self.slots[count:size] = self._spare_slot
            self.positions[count:size] = 0


def sizes(most: int) -> list[int]:
    """Numbers of sequences that are recorded, up to at least ``most``: at most a third of a larger step is
    spare."""
    chosen = [1, 2, 4]
    while chosen[-1] < most:
        last = chosen[-1]
        power = 1 << (last.bit_length() - 1)
        chosen.append(last + max(4, power // 2))
    return [size for index, size in enumerate(chosen) if index == 0 or chosen[index - 1] < most]


def recorder() -> Record:
    """Records with CUDA graphs, which share one pool of memory: they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Step:
        step()  # compiles and tunes kernels, which must not happen while a graph is recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = step()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record
