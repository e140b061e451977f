import pytest
import torch

from common import cache as cache_module
from common.cache import (
    Cache,
    automatic_bytes,
    block_bytes_of,
    choose_num_blocks,
    device_bytes,
    make_layout,
)
from common.config import ConfigError, EngineConfig

CPU = torch.device("cpu")


def make_cache(dtype: str = "float32", num_blocks: int = 6) -> Cache:
    return Cache(make_layout("m", dtype, 3, 2, 8, 4), num_blocks, CPU)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_blocks_bytes_are_what_the_layers_hold_of_it(dtype: str, size: int) -> None:
    cache = make_cache(dtype)
    assert cache.block_bytes == block_bytes_of(cache.layout) == 3 * 2 * 2 * 4 * 8 * size
    for index, layer in enumerate(cache.layers):
        assert layer.shape == (6, 2, 2, 4, 8)
        layer[4] = index + 1
    (view,) = cache.views([4])
    values = torch.frombuffer(bytearray(view), dtype=getattr(torch, dtype))
    assert values.tolist() == [1.0] * 128 + [2.0] * 128 + [3.0] * 128


def test_what_is_written_to_a_view_is_in_the_layers() -> None:
    cache, other = make_cache(), make_cache()
    cache.data[2] = torch.randn(cache.data.shape[1:])
    other.views([5])[0][:] = cache.views([2])[0]
    assert torch.equal(other.data[5], cache.data[2])
    assert not other.data[:5].any()


def test_neighbours_share_a_view_and_the_order_is_kept() -> None:
    cache = make_cache()
    cache.data[:] = torch.arange(6.0).view(6, 1, 1, 1, 1, 1)
    views = cache.views([1, 2, 3, 5, 0, 1])
    assert [len(view) // cache.block_bytes for view in views] == [3, 1, 2]
    values = torch.frombuffer(bytearray(b"".join(views)), dtype=torch.float32)
    assert values[:: cache.block_bytes // 4].tolist() == [1, 2, 3, 5, 0, 1]
    assert cache.views([]) == []


def test_some_layers_of_blocks_have_a_view_for_each_block() -> None:
    cache, other = make_cache(), make_cache()
    cache.data.copy_(torch.randn(cache.data.shape))
    for layers in (range(2), range(2, 3)):
        views = cache.read([1, 2, 5], layers)
        assert [len(view) for view in views] == [len(layers) * cache.layer_bytes] * 3
        for target, view in zip(other.landing([0, 4, 3], layers), views, strict=True):
            target[:] = view
    assert torch.equal(other.data[[0, 4, 3]], cache.data[[1, 2, 5]])
    assert not other.data[[1, 2, 5]].any()


def test_a_new_cache_is_zero() -> None:
    assert not make_cache("bfloat16").data.any()


def test_the_number_of_blocks_comes_from_the_configuration() -> None:
    layout = make_layout("m", "float32", 3, 2, 8, 4)
    assert choose_num_blocks(EngineConfig(num_blocks=7, block_size=4), layout, 100, CPU) == 7
    memory = EngineConfig(kv_cache_memory_bytes=5 * block_bytes_of(layout) + 1, block_size=4)
    assert choose_num_blocks(memory, layout, 100, CPU) == 5


def test_no_more_blocks_are_made_than_can_be_used() -> None:
    layout = make_layout("m", "float32", 3, 2, 8, 4)
    assert choose_num_blocks(EngineConfig(max_num_seqs=3, block_size=4), layout, 10, CPU) == 9


def test_memory_too_small_for_a_block_is_refused_by_name() -> None:
    layout = make_layout("m", "float32", 3, 2, 8, 4)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        choose_num_blocks(EngineConfig(kv_cache_memory_bytes=100), layout, 10, CPU)


def test_the_automatic_size_is_modest() -> None:
    assert 0 < automatic_bytes(EngineConfig(), CPU, 0) <= cache_module.AUTOMATIC_BYTES


@pytest.mark.parametrize(
    ("share", "free", "held", "expected"),
    [(0.5, 70, 20, 25), (0.5, 20, 20, 15), (0.5, 70, 60, 0), (1.0, 3, 20, 0)],
)
def test_a_device_is_shared_as_asked(share: float, free: int, held: int, expected: int) -> None:
    assert device_bytes(share, total=100, free=free, held=held, step_bytes=5) == expected


def test_a_block_of_whole_numbers_has_a_scale_for_every_position_of_a_head() -> None:
    layout = make_layout("m", "int8", 3, 2, 8, 4)
    cache = Cache(layout, 5, CPU)
    assert block_bytes_of(layout) == 3 * 2 * 2 * 4 * (8 + 4)
    assert cache.layer(1).shape == (5, 2, 2, 4, 12)
    assert sum(len(view) for view in cache.views([1, 2, 4])) == 3 * cache.block_bytes


def test_workers_whose_weights_are_not_the_same_numbers_are_told_apart_by_name() -> None:
    ours, theirs = (make_layout("m", "bfloat16", 3, 2, 8, 4, w) for w in ("bfloat16", "bfloat16/int8"))
    assert ours.difference(theirs) == "weights: 'bfloat16' here, 'bfloat16/int8' there"
