"""Blocks of a cache that stands in for a device's, by way of buffers and in place."""

from types import ModuleType

import pytest
import torch

from common.cache import Cache, make_layout
from common.device_blocks import DeviceBlocks
from common.staging import MOST_COPIES, runs
from kernels import specification
from kernels.triton import blocks

CPU = torch.device("cpu")
FEW, MANY = [4, 1, 2, 0], [9, 7, 5, 3, 0, 2]
assert len(runs(FEW)) <= MOST_COPIES < len(runs(MANY))


def make_cache(block_ops: ModuleType = specification, dtype: str = "float16", head_dim: int = 8) -> Cache:
    cache = Cache(make_layout("m", dtype, 3, 2, head_dim, 4), 12, CPU, staged=True, block_ops=block_ops)
    cache.data.copy_(torch.randn(cache.data.shape))
    return cache


def test_runs_are_found() -> None:
    assert runs([7]) == [(7, 7)]
    assert runs([3, 4, 5, 9, 8, 9]) == [(3, 5), (9, 9), (8, 9)]
    assert runs([]) == []


@pytest.mark.parametrize("block_ops", [specification, blocks])
@pytest.mark.parametrize(
    ("ids", "places"), [(FEW, [3, 4, 5, 0]), (MANY, [1, 2, 3, 8, 9, 10]), (FEW, [1, 3, 5, 8])]
)
def test_blocks_that_lie_anywhere_travel_by_way_of_main_memory(
    ids: list[int], places: list[int], block_ops: ModuleType
) -> None:
    source, target = make_cache(block_ops), make_cache(block_ops)
    before = target.data.clone()
    (payload,) = source.read(ids)
    kept = source.data[ids].clone()
    source.data.zero_()  # what was read is a copy: the blocks may be used again
    views = target.landing(places)
    views[0][:] = payload
    assert torch.equal(target.data, before)
    target.landed(places, views)
    assert torch.equal(target.data[places], kept)
    others = [index for index in range(13) if index not in places]
    assert torch.equal(target.data[others], before[others])


@pytest.mark.parametrize("block_ops", [specification, blocks])
def test_layers_that_come_one_after_the_other_add_up_to_the_blocks(block_ops: ModuleType) -> None:
    source, target = make_cache(block_ops), make_cache(block_ops)
    before = target.data.clone()
    places = [1, 2, 3, 8, 9, 10]
    for layers in (range(1), range(1, 3)):
        (payload,) = source.read(MANY, layers)
        assert len(payload) == len(MANY) * len(layers) * source.layer_bytes
        views = target.landing(places, layers)
        views[0][:] = payload
        target.landed(places, views, layers)
    assert torch.equal(target.data[places], source.data[MANY])
    others = [index for index in range(13) if index not in places]
    assert torch.equal(target.data[others], before[others])


def test_a_gathered_piece_has_the_bytes_of_the_blocks_one_by_one() -> None:
    cache = make_cache(blocks)
    (gathered,) = cache.read(MANY)
    assert gathered == b"".join(bytes(cache.read([block_id])[0]) for block_id in MANY)


def test_blocks_in_place_are_the_cache() -> None:
    cache = make_cache(dtype="bfloat16")
    first, second = cache.in_place([5, 3]).tensors
    assert first.nbytes == cache.block_bytes and first.is_contiguous()
    second.zero_()
    assert not cache.data[3].any()
    assert bytes(first.numpy()) == cache.read([5])[0]


def test_blocks_of_main_memory_are_sent_as_bytes() -> None:
    layout = make_layout("m", "float32", 3, 2, 8, 4)
    assert not Cache(layout, 2, CPU).is_on_device
    assert Cache(layout, 2, CPU, staged=True).is_on_device
    odd = make_layout("m", "float16", 1, 1, 1, 1)  # checksums take words of eight bytes
    assert not Cache(odd, 2, CPU, staged=True).is_on_device


def test_a_checksum_is_the_same_wherever_the_blocks_are() -> None:
    cache = make_cache()
    in_place = cache.in_place(MANY).checksum()
    assert DeviceBlocks.of(cache.read(MANY), cache.block_bytes).checksum() == in_place
    assert cache.in_place(FEW).checksum() != in_place


def test_a_checksum_notices_what_has_changed_or_moved() -> None:
    cache = make_cache()
    words = cache.in_place([4]).tensors[0].view(torch.int64)
    seen = {cache.in_place([4, 5]).checksum(), cache.in_place([5, 4]).checksum()}
    for bit in (0, 31, 32, 62, 63):
        for index in (0, 1, len(words) - 1):
            words[index] ^= torch.tensor(1).bitwise_left_shift(bit)
            seen.add(cache.in_place([4, 5]).checksum())
    words[:2] = words[:2].flip(0)
    seen.add(cache.in_place([4, 5]).checksum())
    assert len(seen) == 2 + 5 * 3 + 1
