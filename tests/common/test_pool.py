import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.pool import BlockPool


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_takes_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.take(5) is None
    assert pool.take(3, spare=2) is None
    assert pool.num_free == 4
    assert pool.take(3, spare=1) == [0, 1, 2]
    assert pool.take(2) is None
    assert pool.take(0) == []
    assert pool.num_free == 1


def test_finds_the_longest_known_prefix() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert blocks is not None
    for block_id, number in zip(blocks, (1, 2, 4), strict=True):
        pool.commit(block_id, name(number))
    assert pool.find([name(1), name(2), name(3), name(4)]) == blocks[:2]
    assert pool.find([name(3), name(1)]) == []


def test_blocks_of_a_finished_sequence_are_found_until_they_are_evicted() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert blocks is not None
    hashes = [name(i) for i in range(3)]
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.commit(block_id, block_hash)
    pool.give_back(blocks)
    assert pool.num_free == 4
    assert pool.take(3, pool.find(hashes)) == blocks
    pool.give_back(blocks)
    assert pool.take(2) is not None  # the free one, and the last of the prefix
    assert pool.find(hashes) == blocks[:2]


def test_evicts_what_was_used_longest_ago_and_nothing_while_a_block_is_free() -> None:
    pool = BlockPool(3)
    old, recent = pool.take(1), pool.take(1)
    assert old is not None
    assert recent is not None
    pool.commit(old[0], name(1))
    pool.commit(recent[0], name(2))
    pool.give_back(recent)
    pool.give_back(old)
    again = pool.take(1, pool.find([name(2)]))
    assert again == recent
    pool.give_back(again)
    assert pool.take(1) == [2]
    assert pool.take(1) == old
    assert pool.find([name(2)]) == recent


def test_shared_blocks_count_once_against_what_is_free() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    assert blocks is not None
    pool.commit(blocks[0], name(1))
    shared = pool.find([name(1)])
    assert pool.take(4, shared) is None
    others = pool.take(3, shared)
    assert others == [blocks[0], 2, 3]
    pool.give_back(blocks)
    assert pool.num_free == 1
    pool.give_back(others)
    assert pool.num_free == 4


def test_what_was_committed_first_stays_known() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    assert blocks is not None
    first, second = blocks
    pool.commit(first, name(1))
    pool.commit(second, name(1))
    assert pool.find([name(1)]) == [first]
    pool.give_back([second])
    pool.check([[first]])


def test_knows_nothing_by_hash_when_caching_is_off() -> None:
    pool = BlockPool(2, caching=False)
    blocks = pool.take(1)
    assert blocks is not None
    pool.commit(blocks[0], name(1))
    assert pool.find([name(1)]) == []
    assert pool.take_events() == ((), ())


def test_tells_net_changes_only() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.take(1) or []
    pool.commit(block_id, name(1))
    pool.give_back([block_id])
    assert pool.hashes() == (name(1),)
    assert pool.take_events() == ((name(1),), ())
    (block_id,) = pool.take(1) or []
    pool.commit(block_id, name(2))
    pool.give_back([block_id])
    (block_id,) = pool.take(1) or []
    pool.commit(block_id, name(1))
    assert pool.take_events() == ((), ())


def test_notices_a_block_given_back_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    assert blocks is not None
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(blocks)


def test_notices_lost_blocks() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check([])


class Pool(RuleBasedStateMachine):
    """Any order of calls, against a record of who holds what and what every block contains."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.known: set[bytes] = set()

    @rule(prefix=st.lists(st.integers(0, 9), max_size=4), extra=st.integers(0, 4), spare=st.integers(0, 2))
    def take(self, prefix: list[int], extra: int, spare: int) -> None:
        hashes = [name(number) for number in prefix]
        shared = self.pool.find(hashes)
        assert [self.content[block_id] for block_id in shared] == hashes[: len(shared)]
        num_free = self.pool.num_free
        blocks = self.pool.take(len(set(shared)) + extra, list(dict.fromkeys(shared)), spare)
        if blocks is None:
            assert self.pool.num_free == num_free
            return
        assert self.pool.num_free >= spare
        self.held.append(blocks)
        owned_before = {block_id for blocks in self.held[:-1] for block_id in blocks}
        for block_id in blocks[len(set(shared)) :]:
            assert block_id not in owned_before
            self.content.pop(block_id, None)

    @rule(data=st.data(), number=st.integers(0, 9))
    def commit(self, data: st.DataObject, number: int) -> None:
        fresh = [b for blocks in self.held for b in blocks if b not in self.content]
        if fresh:
            block_id = data.draw(st.sampled_from(fresh))
            self.pool.commit(block_id, name(number))
            self.content[block_id] = name(number)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self.pool.give_back(self.held.pop(index))

    @rule()
    def listen(self) -> None:
        events = self.pool.take_events()
        assert self.known.isdisjoint(events.stored)
        assert self.known.issuperset(events.removed)
        self.known = (self.known | set(events.stored)) - set(events.removed)
        assert self.known == set(self.pool.hashes())

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.held)


Pool.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase
