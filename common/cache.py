"""The memory that holds keys and values.

One tensor [N, L, 2, G, B, D]: N blocks, L layers, keys and values, G key/value heads, B positions, D head
dim. A block's bytes for all layers are contiguous, so a block, or a run of neighbouring ones, travels
without being gathered. Kernels see one layer at a time as a view [N, 2, G, B, D]. In a cache of whole numbers
the bytes of a position's scale follow its D numbers.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from common.config import ConfigError, EngineConfig
from common.device_blocks import WORD_BYTES, DeviceBlocks
from common.messages import PROTOCOL_VERSION, Layout
from common.staging import BlockOps, Staging, runs
from kernels import specification
from kernels.memory import in_large_pages

SCALE_BYTES = 4  # behind the numbers of one position of one head, where they are whole numbers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"int8": torch.int8}
AUTOMATIC_BYTES = 1 << 30  # at most, in main memory: it is shared with other workers and other programs
AUTOMATIC_SHARE = 0.2  # of the main memory at hand
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
    """On a device the bytes of blocks travel by way of main memory (``common.staging``), or from where they
    are; ``staged`` asks for that anywhere."""

    def __init__(
        self,
        layout: Layout,
        num_blocks: int,
        device: torch.device,
        staged: bool = False,
        block_ops: BlockOps = specification,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self.block_bytes = block_bytes_of(layout)
        self.layer_bytes = self.block_bytes // layout.num_layers
        num_heads, block_size = layout.num_kv_heads, layout.block_size
        shape = (num_blocks, layout.num_layers, 2, num_heads, block_size, row_width(layout))
        dtype = CACHE_DTYPES[layout.dtype]
        self._bytes: memoryview | None = None
        if device.type == "cpu" and not staged:
            num_bytes = math.prod(shape) * dtype.itemsize
            self._bytes = in_large_pages(num_bytes)
            self.data = torch.frombuffer(self._bytes, dtype=dtype).view(shape)
        else:
            # One block more, the last, is nobody's: recorded steps write there what fills them up.
            self.data = torch.zeros((num_blocks + 1, *shape[1:]), dtype=dtype, device=device)
        self._staging = Staging(self.data, block_ops)
        self.layers: list[Tensor] = list(self.data.unbind(1))

    @property
    def is_on_device(self) -> bool:
        """Whether ``in_place`` can be asked."""
        return self._bytes is None and self.block_bytes % WORD_BYTES == 0

    def layer(self, index: int) -> Tensor:
        """One layer's keys and values: [N, 2, G, B, D], not contiguous in N."""
        return self.layers[index]

    def views(self, block_ids: Sequence[int], layers: range | None = None) -> list[memoryview]:
        """The bytes of the blocks, in this order, writable; blocks that are neighbours in memory share a
        view. Of some layers alone there is a view for each block."""
        if self._bytes is None:
            raise ValueError(f"blocks on {self.device} have no bytes in main memory")
        size = self.block_bytes
        if layers is not None:
            part = self._part(layers)
            return [self._bytes[block * size :][part] for block in block_ids]
        return [self._bytes[first * size : (last + 1) * size] for first, last in runs(block_ids)]

    def in_place(self, block_ids: Sequence[int]) -> DeviceBlocks:
        """The blocks themselves, in the memory of a device."""
        raw = self.data.view(torch.uint8).flatten(1)
        return DeviceBlocks([raw[block_id] for block_id in block_ids])

    def read(self, block_ids: Sequence[int], layers: range | None = None) -> list[memoryview]:
        """The bytes of the blocks, or of these layers of them, to be read: in place, or a copy from the
        device."""
        if self._bytes is not None:
            return self.views(block_ids, layers)
        return [self._staging.read(block_ids, self._part(layers))]

    def landing(self, block_ids: Sequence[int], layers: range | None = None) -> list[memoryview]:
        """Where to write what ``read`` gives; then call ``landed``."""
        if self._bytes is not None:
            return self.views(block_ids, layers)
        return [self._staging.landing(len(block_ids), self._part(layers))] if block_ids else []

    def landed(
        self, block_ids: Sequence[int], views: Sequence[memoryview], layers: range | None = None
    ) -> None:
        """What was written to ``landing``'s views is what the blocks hold from now on."""
        if self._bytes is None:
            self._staging.landed(block_ids, views[0], self._part(layers))

    def _part(self, layers: range | None) -> slice:
        """Of a block's bytes."""
        if layers is None:
            return slice(0, self.block_bytes)
        return slice(layers.start * self.layer_bytes, layers.stop * self.layer_bytes)
