import random

from proxy.index import BlockIndex


def name(number: int) -> bytes:
    return number.to_bytes(16)


def test_tells_how_much_of_a_prompt_each_worker_holds() -> None:
    index = BlockIndex()
    index.store("a", map(name, (1, 2, 3)))
    index.store("b", map(name, (1, 2)))
    index.store("c", map(name, (2, 3)))
    assert index.overlap(map(name, (1, 2, 3, 4))) == {"a": 3, "b": 2}
    assert index.overlap(map(name, (9, 1))) == {}
    assert index.overlap([]) == {}


def test_a_block_in_the_middle_that_is_gone_ends_the_overlap() -> None:
    index = BlockIndex()
    index.store("a", map(name, (1, 2, 3)))
    index.remove("a", [name(2), name(77)])
    assert index.overlap(map(name, (1, 2, 3))) == {"a": 1}
    assert index.num_blocks("a") == 2


def test_reads_no_further_than_somebody_knows_the_prompt() -> None:
    index = BlockIndex()
    index.store("a", [name(1)])
    hashes = iter(map(name, range(1, 100)))
    index.overlap(hashes)
    assert next(hashes) == name(3)


def test_telling_something_twice_changes_nothing() -> None:
    index = BlockIndex()
    index.store("a", [name(1), name(1)])
    index.store("a", [name(1)])
    assert index.num_blocks("a") == 1
    index.remove("a", [name(1), name(1)])
    assert (index.num_blocks("a"), len(index)) == (0, 0)


def test_a_worker_that_is_gone_is_not_found_even_before_it_is_swept_out() -> None:
    index = BlockIndex()
    index.store("a", map(name, range(10)))
    index.store("b", map(name, range(5)))
    index.forget("a")
    index.forget("a")
    assert index.overlap(map(name, range(10))) == {"b": 5}
    assert index.num_blocks("a") == 0
    for _ in range(3):
        index.sweep(max_blocks=4)
    assert len(index) == 5
    assert index.overlap(map(name, range(10))) == {"b": 5}


def test_the_place_of_a_worker_is_given_to_another_only_when_nothing_of_it_is_left() -> None:
    index = BlockIndex()
    index.store("a", map(name, range(10)))
    index.forget("a")
    index.store("b", [name(0)])  # before the sweep: must not inherit
    assert index.overlap(map(name, range(10))) == {"b": 1}
    index.sweep()
    index.store("c", [name(5)])
    assert index.overlap(map(name, range(10))) == {"b": 1}
    assert index.overlap([name(5), name(6)]) == {"c": 1}


def test_agrees_with_a_set_for_each_worker() -> None:
    rng = random.Random(5)
    index, sets = BlockIndex(), {worker: set[int]() for worker in "abcdefgh"}
    for _ in range(3000):
        worker, numbers = rng.choice("abcdefgh"), [rng.randrange(40) for _ in range(rng.randrange(6))]
        match rng.randrange(20):
            case 0:
                index.forget(worker)
                sets[worker].clear()
            case 1 | 2:
                index.sweep(max_blocks=7)
            case number if number < 12:
                index.store(worker, map(name, numbers))
                sets[worker].update(numbers)
            case _:
                index.remove(worker, map(name, numbers))
                sets[worker].difference_update(numbers)
        prompt = [rng.randrange(40) for _ in range(4)]
        expected = {
            w: next((i for i, n in enumerate(prompt) if n not in held), 4) for w, held in sets.items()
        }
        assert index.overlap(map(name, prompt)) == {w: count for w, count in expected.items() if count}
        assert all(index.num_blocks(w) == len(held) for w, held in sets.items())
