import torch

from kernels.memory import ALIGNMENT, LARGE_PAGE, REGION_BYTES, Regions, in_large_pages


def test_memory_is_as_long_as_asked_for_and_zero() -> None:
    for num_bytes in (1, 5000, LARGE_PAGE + 1):
        memory = in_large_pages(num_bytes)
        assert len(memory) == num_bytes and not torch.frombuffer(memory, dtype=torch.uint8).any()
        memory[num_bytes - 1] = 7


def test_pieces_of_a_region_are_aligned_and_apart() -> None:
    regions = Regions()
    pieces = [regions.take(num_bytes) for num_bytes in (1, 100, 64, REGION_BYTES // 4, REGION_BYTES, 3)]
    for number, piece in enumerate(pieces, start=1):
        assert piece.data_ptr() % ALIGNMENT == 0
        piece.fill_(number)
    assert [len(piece) for piece in pieces] == [1, 100, 64, REGION_BYTES // 4, REGION_BYTES, 3]
    assert all((piece == number).all() for number, piece in enumerate(pieces, start=1))


def test_a_region_that_is_used_up_gives_way_to_the_next() -> None:
    regions = Regions()
    pieces = [regions.take(REGION_BYTES // 4) for _ in range(5)]
    pieces[4].fill_(1)
    assert not any(piece.any() for piece in pieces[:4])
