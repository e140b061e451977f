from typing import cast

from common.block_news import MAX_HASHES, BlockNews, News, everything
from common.channel import ProxyChannel
from common.messages import BlocksRemoved, BlocksStored
from common.pool import BlockPool, CacheEvents


class Book:
    """A pool, as engines offer it."""

    def __init__(self, num_blocks: int = 4) -> None:
        self.pool = BlockPool(num_blocks)

    def take_events(self) -> CacheEvents:
        return self.pool.take_events()

    def cached_hashes(self) -> tuple[CacheEvents, tuple[bytes, ...]]:
        return self.pool.take_events(), self.pool.hashes()

    def fill(self, *names: bytes) -> None:
        for name in names:
            taken = self.pool.take(1)
            assert taken is not None
            self.pool.commit(taken[0], name)
            self.pool.give_back(taken)


A, B = cast(ProxyChannel, "a"), cast(ProxyChannel, "b")


def known_after(news: list[News], before: frozenset[bytes] = frozenset()) -> set[bytes]:
    known = set(before)
    for message in news:
        if isinstance(message, BlocksRemoved):
            known -= set(message.block_hashes)
        else:
            known = (set() if message.is_first else known) | set(message.block_hashes)
    return known


def test_a_new_session_hears_everything_and_the_others_what_has_changed() -> None:
    book = Book()
    news = BlockNews(book)
    book.fill(b"1", b"2")
    assert list(news.take([A])) == [(A, BlocksStored((b"1", b"2"), is_first=True))]
    book.fill(b"3")
    assert list(news.take([A, B])) == [
        (A, BlocksStored((b"3",))),
        (B, BlocksStored((b"1", b"2", b"3"), is_first=True)),
    ]
    assert list(news.take([A, B])) == []


def test_after_a_lost_session_everything_is_told_again() -> None:
    book = Book()
    news = BlockNews(book)
    book.fill(b"1")
    list(news.take([A]))
    news.forget(A)
    book.fill(b"2")
    assert list(news.take([])) == []
    assert list(news.take([A])) == [(A, BlocksStored((b"1", b"2"), is_first=True))]


def test_an_empty_cache_is_told_too_so_that_what_was_before_is_void() -> None:
    assert list(BlockNews(Book()).take([A])) == [(A, BlocksStored((), is_first=True))]


def test_what_comes_and_goes_around_a_first_telling_leaves_no_trace() -> None:
    book = Book(num_blocks=2)
    news = BlockNews(book)
    book.fill(b"1")
    told = [message for _, message in news.take([A])]
    book.fill(b"2", b"3", b"4")  # evicts the first ones
    told += [message for _, message in news.take([A])]
    assert known_after(told) == set(book.pool.hashes()) == {b"3", b"4"}


def test_much_is_told_in_messages_of_bounded_size() -> None:
    names = tuple(index.to_bytes(16) for index in range(2 * MAX_HASHES + 1))
    messages = list(everything(names))
    assert [len(message.block_hashes) for message in messages] == [MAX_HASHES, MAX_HASHES, 1]
    assert [message.is_first for message in messages] == [True, False, False]
    assert known_after(list(messages)) == set(names)
