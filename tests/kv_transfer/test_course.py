"""In which pieces blocks leave."""

import random

import pytest

from kv_transfer.course import Course, Piece

LAYERS = 6
PLENTY = 1 << 30


def leaving(course: Course, most_bytes: int = PLENTY) -> list[Piece]:
    """All that may leave now."""
    pieces = []
    while (piece := course.next(most_bytes)) is not None:
        course.take(piece)
        pieces.append(piece)
    return pieces


def test_blocks_that_are_computed_leave_whole_and_in_runs_of_the_usual_size() -> None:
    course = Course(LAYERS, layer_bytes=10, piece_bytes=200)
    course.note_whole(7)
    assert leaving(course) == [Piece(first, count, range(6)) for first, count in ((0, 3), (3, 3), (6, 1))]
    assert course.num_gone == 7


def test_layers_leave_as_a_step_passes_them_and_only_the_last_ones_are_left_at_its_end() -> None:
    course = Course(LAYERS, layer_bytes=10, piece_bytes=1000)
    course.note_partial(4, 2)
    assert leaving(course) == [Piece(0, 4, range(2))]
    assert course.num_gone == 0
    course.note_partial(4, 5)
    assert leaving(course) == [Piece(0, 4, range(2, 5))]
    course.note_whole(4)
    assert leaving(course) == [Piece(0, 4, range(5, 6))]
    assert course.num_gone == 4


def test_what_the_receiver_has_is_left_out_of_a_step_under_way() -> None:
    course = Course(LAYERS, layer_bytes=10, piece_bytes=1000)
    course.note_partial(5, 3)
    course.begin(2)
    assert leaving(course) == [Piece(2, 3, range(3))]
    course.note_whole(5)
    assert leaving(course) == [Piece(2, 3, range(3, 6))]


def test_nothing_leaves_of_a_step_whose_blocks_the_receiver_has() -> None:
    course = Course(LAYERS, layer_bytes=10, piece_bytes=1000)
    course.begin(5)
    course.note_partial(4, 3)
    assert leaving(course) == []
    course.note_whole(5)
    assert leaving(course) == [] and course.num_gone == 5


def test_no_more_leaves_than_may_but_what_is_cut_short_goes_on_where_it_was() -> None:
    course = Course(LAYERS, layer_bytes=10, piece_bytes=1000)
    course.note_partial(4, 2)
    assert course.next(19) is None
    piece = course.next(59)
    assert piece == Piece(0, 2, range(2))
    course.take(piece)
    course.note_whole(4)
    assert leaving(course) == [Piece(2, 2, range(2)), Piece(0, 4, range(2, 6))]


def test_a_single_block_leaves_though_it_is_larger_than_a_piece() -> None:
    course = Course(LAYERS, layer_bytes=10, piece_bytes=5)
    course.note_whole(2)
    assert leaving(course) == [Piece(0, 1, range(6)), Piece(1, 1, range(6))]


@pytest.mark.parametrize("seed", range(30))
def test_every_layer_of_every_block_leaves_once_when_it_is_computed_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    course = Course(LAYERS, layer_bytes=10, piece_bytes=chance.choice([10, 100, 1000]))
    skipped = chance.choice([0, 0, 3, 12])
    here = [LAYERS if block < skipped else 0 for block in range(12)]
    num_whole, is_accepted = 0, False
    while num_whole < 12:
        end = min(12, num_whole + chance.randint(0, 5))
        for passed in sorted(chance.sample(range(1, LAYERS + 1), chance.randint(0, 3))):
            course.note_partial(end, passed)
            if not is_accepted and chance.random() < 0.3:
                is_accepted = True
                course.begin(skipped)
            for piece in leaving(course, chance.choice([30, PLENTY])) if is_accepted else []:
                receive(here, piece)
            computed = [LAYERS] * num_whole + [passed] * (end - num_whole) + [0] * (12 - end)
            assert all(a <= b for a, b in zip(here[skipped:], computed[skipped:], strict=True))
        course.note_whole(end)
        num_whole = end
    if not is_accepted:
        course.begin(skipped)
    for piece in leaving(course):
        receive(here, piece)
    assert here == [LAYERS] * 12 and course.num_gone == 12


def receive(here: list[int], piece: Piece) -> None:
    for block in range(piece.first, piece.first + piece.count):
        assert here[block] == piece.layers.start
        here[block] = piece.layers.stop
