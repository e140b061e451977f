from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.messages import FinishReason, Sampling
from proxy.attempt import Batch
from proxy.job import Job, Prompt
from proxy.stop_strings import StopStrings
from proxy.text import Detokenized, Piece
from tests.proxy.conftest import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
JOB = Job(
    endpoint="completions",
    prompts=(Prompt((1,), "", 100),),
    n=1,
    sampling=Sampling(max_tokens=100),
    stop=(),
    stream=False,
    include_usage=False,
    timeout_s=1.0,
)


def pieces(
    tokens: list[int], finish: FinishReason = "length", size: int = 1, **options: object
) -> list[Piece]:
    text = Detokenized(TOKENIZER, replace(JOB, **options))
    found = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        batch = Batch(part, [], finish if start + size >= len(tokens) else None)
        if piece := text.push(batch):
            found.append(piece)
            if piece.finish_reason is not None:
                break
    return found


def text_of(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


def test_characters_split_over_tokens_come_whole() -> None:
    text = "žluťoučký 🙂 漢字"
    found = pieces(list(text.encode()))
    assert text_of(found) == text
    assert not any("�" in piece.text for piece in found)
    assert len(found) == len(text)


def test_a_character_cut_off_by_the_end_is_told_once() -> None:
    found = pieces(list("ok 🙂".encode())[:-1])
    assert text_of(found) == "ok �"


def test_a_stop_string_spanning_tokens_is_cut_off() -> None:
    found = pieces(list(b"one two STOP three"), stop=("STOP",))
    assert text_of(found) == "one two "
    assert found[-1].finish_reason == "stop"
    assert sum(len(piece.token_ids) for piece in found) == len(b"one two STOP")


def test_text_like_the_beginning_of_a_stop_string_is_held_back_and_given_out_later() -> None:
    found = pieces(list(b"xSTx"), stop=("STOP",))
    assert [piece.text for piece in found] == ["x", "STx"]
    assert text_of(pieces(list(b"xSTO"), stop=("STOP",))) == "xSTO"


def test_stop_strings_may_be_included() -> None:
    assert text_of(pieces(list(b"one STOP two"), stop=("STOP",), include_stop=True)) == "one STOP"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    sampling = Sampling(max_tokens=100, min_tokens=6)
    found = pieces(list(b"a.b.c.d."), stop=(".",), sampling=sampling)
    assert text_of(found) == "a.b.c"


def test_the_token_that_ends_a_sequence_is_no_text_but_is_counted() -> None:
    (first, last) = pieces([ord("a"), END], "stop")
    assert (first.text, last.text, last.finish_reason) == ("a", "", "stop")
    assert last.token_ids == [END]
    assert text_of(pieces([ord("a"), ord("!")], "stop")) == "a"


def test_special_tokens_show_when_asked_for() -> None:
    assert text_of(pieces([ord("a"), END, ord("b")])) == "ab"
    assert text_of(pieces([ord("a"), END, ord("b")], skip_special_tokens=False)) == "a<end>b"


WORDS = st.text(alphabet="abé", min_size=1, max_size=4)


@given(
    text=st.text(alphabet="abé", min_size=1, max_size=30),
    stop=st.lists(WORDS, min_size=1, max_size=3),
    size=st.integers(1, 5),
)
def test_stopping_in_a_stream_equals_stopping_in_the_whole_text(
    text: str, stop: list[str], size: int
) -> None:
    found = pieces(list(text.encode()), size=size, stop=tuple(stop))
    whole = next(
        (
            text[: end - len(word)]
            for end in range(len(text) + 1)
            for word in sorted(stop, key=len, reverse=True)
            if text[:end].endswith(word)
        ),
        None,
    )
    assert text_of(found) == (text if whole is None else whole)
    assert found[-1].finish_reason == ("length" if whole is None else "stop")


@given(text=st.text(alphabet="ab", max_size=30), sizes=st.lists(st.integers(1, 4), min_size=30, max_size=30))
def test_nothing_is_lost_while_scanning(text: str, sizes: list[int]) -> None:
    scanner, given_out, rest = StopStrings(("abba",), False), "", text
    stopped = False
    while rest and not stopped:
        size = sizes.pop()
        scan = scanner.push(rest[:size])
        given_out, stopped, rest = given_out + scan.text, scan.stopped, rest[size:]
    if not stopped:
        given_out += scanner.release()
    assert given_out == text.partition("abba")[0]
