"""The memory that holds keys and values.

One tensor [N, L, 2, G, B, D]: N blocks, L layers, keys and values, G key/value heads, B positions, D head
dim. A block's bytes for all layers are contiguous, so a block, or a run of neighbouring ones, travels
without being gathered. Kernels see one layer at a time as a view [N, 2, G, B, D]. In a cache of whole numbers
the bytes of a position's scale follow its D numbers.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from torch import Tensor

from common.config import ConfigError, EngineConfig
from common.messages import PROTOCOL_VERSION, Layout

SCALE_BYTES = 4  # behind the numbers of one position of one head, where they are whole numbers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"int8": torch.int8}
AUTOMATIC_BYTES = 1 << 30  # at most, in main memory: it is shared with other workers and other programs
AUTOMATIC_SHARE = 0.2  # of the main memory at hand
PAGES_AT_ONCE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)  # Linux has it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def make_layout(
    model_fingerprint: str,
    dtype: str,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    weights: str = "",
) -> Layout:
    """What two workers have to agree on. ``dtype`` is that of the cache, resolved: not "auto"."""
    assert dtype in CACHE_DTYPES, dtype
    return Layout(
        PROTOCOL_VERSION,
        model_fingerprint,
        dtype,
        num_layers,
        num_kv_heads,
        head_dim,
        block_size,
        weights=weights,
    )


def block_bytes_of(layout: Layout) -> int:
    positions = layout.num_layers * 2 * layout.num_kv_heads * layout.block_size
    return positions * row_width(layout) * CACHE_DTYPES[layout.dtype].itemsize


def row_width(layout: Layout) -> int:
    """Elements that one position of one head takes."""
    return layout.head_dim + (SCALE_BYTES if layout.dtype == "int8" else 0)


def choose_num_blocks(
    config: EngineConfig, layout: Layout, max_model_len: int, device: torch.device, step_bytes: int = 0
) -> int:
    """From the configuration; without a word there, from the memory at hand, but no more than can ever be
    of use; ``step_bytes`` are left for steps to compute in. Raises ``ConfigError`` where not even one block
    fits."""
    if config.num_blocks:
        return config.num_blocks
    block_bytes = block_bytes_of(layout)
    if config.kv_cache_memory_bytes:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
    else:
        useful = config.max_num_seqs * -(-max_model_len // layout.block_size)
        num_blocks = min(useful, automatic_bytes(config, device, step_bytes) // block_bytes)
    if num_blocks < 1:
        raise ConfigError(f"--kv-cache-memory-bytes: one block alone takes {block_bytes} bytes")
    return num_blocks


def automatic_bytes(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    """What the worker's share of a device leaves beside weights and steps; a modest share of main memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        return device_bytes(config.gpu_memory_utilization, total, free, held, step_bytes)
    available = psutil.virtual_memory().available
    if CGROUP_LIMIT.is_file() and (limit := CGROUP_LIMIT.read_text().strip()).isdigit():
        available = min(available, int(limit))
    return min(AUTOMATIC_BYTES, int(available * AUTOMATIC_SHARE))


def device_bytes(share: float, total: int, free: int, held: int, step_bytes: int) -> int:
    """For the cache of a process that may take ``share`` of a device's ``total`` memory and holds ``held`` of
    it already, when ``free`` is left by everybody."""
    return max(0, min(int(share * total) - held, free) - step_bytes)


class Cache:
    """In main memory all its pages are asked for at the start: getting them one by one, when a block is first
    written, takes longer than writing it.
    On a device the bytes of blocks travel by way of main memory, on a stream of their own, beside the steps;
    ``staged`` asks for that anywhere. What a step wrote can be read once the host has seen the step end."""

    def __init__(self, layout: Layout, num_blocks: int, device: torch.device, staged: bool = False) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self.block_bytes = block_bytes_of(layout)
        num_heads, block_size = layout.num_kv_heads, layout.block_size
        shape = (num_blocks, layout.num_layers, 2, num_heads, block_size, row_width(layout))
        dtype = CACHE_DTYPES[layout.dtype]
        self._bytes: memoryview | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if device.type == "cpu" and not staged:
            num_bytes = math.prod(shape) * dtype.itemsize
            memory = mmap.mmap(-1, num_bytes, flags=PAGES_AT_ONCE)
            self._bytes = memoryview(memory)
            self.data = torch.frombuffer(memory, dtype=dtype).view(shape)
        else:
            # One block more, the last, is nobody's: recorded steps write there what fills them up.
            self.data = torch.zeros((num_blocks + 1, *shape[1:]), dtype=dtype, device=device)
        self.layers: list[Tensor] = list(self.data.unbind(1))

    def layer(self, index: int) -> Tensor:
        """One layer's keys and values: [N, 2, G, B, D], not contiguous in N."""
        return self.layers[index]

    def views(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of the blocks, in this order, writable; blocks that are neighbours in memory share a
        view."""
        if self._bytes is None:
            raise ValueError(f"blocks on {self.device} have no bytes in main memory")
        size = self.block_bytes
        return [self._bytes[first * size : (last + 1) * size] for first, last in runs(block_ids)]

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of the blocks, to be read: in place, or a copy from the device."""
        if self._bytes is not None:
            return self.views(block_ids)
        host = self._host_memory(len(block_ids))
        with self._copying():
            for rows, blocks in self._runs(host, block_ids):
                rows.copy_(blocks, non_blocking=True)
        return [host.flatten().numpy().data]

    def landing(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Where to write the bytes of the blocks; then call ``landed``."""
        if self._bytes is not None:
            return self.views(block_ids)
        if not block_ids:
            return []
        return [self._host_memory(len(block_ids)).flatten().numpy().data]

    def landed(self, block_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        """What was written to ``landing``'s views is what the blocks hold from now on."""
        if self._bytes is not None:
            return
        host = torch.frombuffer(views[0], dtype=torch.uint8).view(len(block_ids), self.block_bytes)
        with self._copying():
            for rows, blocks in self._runs(host, block_ids):
                blocks.copy_(rows, non_blocking=True)

    def _host_memory(self, num_blocks: int) -> Tensor:
        """Pinned where the device can then copy by itself: [num_blocks, block_bytes] uint8."""
        pinned = self.device.type == "cuda"
        return torch.empty(num_blocks, self.block_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _runs(self, host: Tensor, block_ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of ``host`` and the blocks that they stand for, bytes both, a pair for each run of blocks."""
        raw = self.data.view(torch.uint8).flatten(1)
        row = 0
        for first, last in runs(block_ids):
            yield host[row : row + last - first + 1], raw[first : last + 1]
            row += last - first + 1

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copies begun inside are done afterwards; steps go on meanwhile."""
        if self._copies is None:
            yield
        else:
            with torch.cuda.stream(self._copies):
                yield
            self._copies.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has done what this thread gave it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive ids."""
    if not block_ids:
        return []
    breaks = [index for index, (a, b) in enumerate(pairwise(block_ids), 1) if b != a + 1]
    starts, ends = [0, *breaks], [*breaks, len(block_ids)]
    return [(block_ids[start], block_ids[end - 1]) for start, end in zip(starts, ends, strict=True)]
