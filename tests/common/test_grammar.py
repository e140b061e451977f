import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import decoders, models, pre_tokenizers

from common.engine import Engine
from common.grammar import GrammarError, Grammars
from common.messages import Refusal
from common.tokenizer import Tokenizer, byte_alphabet, bytes_of_tokens
from tests.common.test_engine import hand_over, output_of
from tests.common.toy import EOS, VOCAB_SIZE, make_engine, make_sequence, prompt, run

WORDS = LLMatcher.grammar_from_regex("[a-c]{3,9}( [x-z]{2})*")
PATTERN = re.compile("[a-c]{3,9}( [x-z]{2})*")


def toy_tokenizer() -> Tokenizer:
    """Token i is the character 32 + i, and the last one the end."""
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    library = tokenizers.Tokenizer(models.BPE(vocab={spelling[32 + i]: i for i in range(EOS)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    return Tokenizer(library, bytes_of_tokens(library, Path("toy")), {"eos_token": "<end>"})


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars.of(toy_tokenizer(), VOCAB_SIZE, [EOS])


def ids(text: str) -> list[int]:
    return [ord(character) - 32 for character in text]


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(32 + token_id) for token_id in token_ids)


def allowed(grammars: Grammars, grammar: str, *pieces: str) -> str:
    """The characters that may come after the pieces, read one by one; ``$`` is the end."""
    automaton = grammars.compile(grammar)
    output: list[int] = []
    for piece in pieces:
        output += ids(piece)
        automaton.read(output)
    mask = automaton.mask()
    found = [i for i in range(VOCAB_SIZE) if mask[i // 8] >> i % 8 & 1]
    return "".join("$" if i == EOS else chr(32 + i) for i in found)


def test_only_what_the_grammar_says_may_come_next(grammars: Grammars) -> None:
    assert allowed(grammars, WORDS) == "abc"
    assert allowed(grammars, WORDS, "ab") == "abc"
    assert allowed(grammars, WORDS, "abc") == " abc$"
    assert allowed(grammars, WORDS, "abc ") == "xyz"
    assert allowed(grammars, WORDS, "abc xy") == " $"


def test_the_tokens_alone_say_where_in_the_grammar_a_sequence_is(grammars: Grammars) -> None:
    text = "abcab xy zz"
    for cut in range(len(text)):
        whole = allowed(grammars, WORDS, text)
        assert allowed(grammars, WORDS, text[:cut], text[cut:]) == whole


def test_after_the_end_nothing_but_the_end_may_come(grammars: Grammars) -> None:
    automaton = grammars.compile(LLMatcher.grammar_from_regex("no"))
    automaton.read(ids("no"))
    assert automaton.is_complete
    automaton.read([*ids("no"), EOS, EOS])
    assert [i for i in range(VOCAB_SIZE) if automaton.mask()[i // 8] >> i % 8 & 1] == [EOS]


def test_an_output_that_is_not_in_the_grammar_is_an_error(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="cannot take token"):
        grammars.compile(WORDS).read(ids("abq"))


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("(a"),
        LLMatcher.grammar_from_regex("(?=a)b"),
        LLMatcher.grammar_from_lark('start: "a'),
        LLMatcher.grammar_from_lark("start: nowhere"),
        LLMatcher.grammar_from_json_schema({"type": "thing"}),
        LLMatcher.grammar_from_json_schema({"$ref": "#/nowhere"}),
        LLMatcher.grammar_from_json_schema({"type": "string", "minLength": 5, "maxLength": 3}),
        "{",
        "",
    ],
)
def test_a_grammar_that_is_none_is_an_error_with_a_reason(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(GrammarError, match=r"\w"):
        grammars.compile(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex(r"[^\s\S]"),
        LLMatcher.grammar_from_json_schema({"$ref": "#"}),
        LLMatcher.grammar_from_lark("start: start"),
    ],
)
def test_a_grammar_that_no_output_fits_is_refused_before_it_is_used(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(GrammarError, match="no output fits the grammar"):
        grammars.compile(grammar)


def test_a_grammar_too_large_to_be_followed_is_refused_before_it_is_used(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="too many expressions"):
        grammars.compile(LLMatcher.grammar_from_regex("(b{900}){1000}c"))


def test_two_thousand_choices_can_be_followed(grammars: Grammars) -> None:
    words = [f"{number:04d}" * 3 for number in range(2000)]
    grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(word) for word in words))
    assert allowed(grammars, grammar, "1999199") == "9"


def test_a_vocabulary_without_an_end_takes_no_grammar() -> None:
    with pytest.raises(GrammarError, match="no token that ends"):
        Grammars.of(toy_tokenizer(), VOCAB_SIZE, []).compile(WORDS)


def test_rows_beyond_the_tokenizer_are_never_allowed() -> None:
    automaton = Grammars.of(toy_tokenizer(), VOCAB_SIZE + 31, [EOS]).compile(
        LLMatcher.grammar_from_regex(".*")
    )
    mask = int.from_bytes(automaton.mask(), "little")
    assert mask >> VOCAB_SIZE == 0
    assert mask >> EOS == 1


# In an engine


def engine_with(grammars: Grammars, **changes: Any) -> Engine:
    return make_engine(grammars=grammars, **changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_every_output_follows_the_grammar(
    grammars: Grammars, temperature: float, num_logprobs: int | None
) -> None:
    engine = engine_with(grammars)
    sequences = [
        make_sequence(
            f"r{seed}", prompt(seed + 1), grammar=WORDS, max_tokens=200, temperature=temperature, seed=seed,
            num_logprobs=num_logprobs, presence_penalty=0.5, ignore_eos=seed % 2 == 0,
        )
        for seed in range(8)
    ]  # fmt: skip
    for sequence in sequences:
        engine.add(sequence)
    reasons = {output.sequence.key: output.finish_reason for output in run(engine)}
    for sequence in sequences:
        output = output_of(sequence)
        if reasons[sequence.key] == "stop":
            assert output.pop() == EOS
            assert PATTERN.fullmatch(text_of(output))
        else:
            assert len(output) == 200
    assert "stop" in reasons.values()


def test_json_of_a_schema_can_be_read_and_has_its_fields(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "size"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    engine = engine_with(grammars)
    sequence = make_sequence(
        "r", prompt(9), grammar=LLMatcher.grammar_from_json_schema(schema), max_tokens=100, ignore_eos=False
    )
    engine.add(sequence)
    run(engine)
    assert output_of(sequence)[-1] == EOS
    reply = json.loads(text_of(output_of(sequence)[:-1]))
    assert set(reply) == {"ok", "size"}
    assert isinstance(reply["ok"], bool)
    assert 0 <= reply["size"] <= 99


def test_a_retry_and_a_hand_over_go_on_in_the_same_automaton(grammars: Grammars) -> None:
    options: dict[str, Any] = {
        "grammar": WORDS,
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": 5,
        "min_tokens": 30,
    }
    whole = make_sequence("whole", prompt(20), **options)
    alone = engine_with(grammars)
    alone.add(whole)
    run(alone)
    assert len(output_of(whole)) >= 30
    for cut in (1, 2, 11):
        retried = make_sequence("again", whole.token_ids[: 20 + cut], num_prompt_tokens=20, **options)
        engine = engine_with(grammars)
        engine.add(retried)
        run(engine)
        assert output_of(retried) == output_of(whole)
    source, target = engine_with(grammars), engine_with(grammars)
    adopted = hand_over(source, target, make_sequence("moved", prompt(20), handoff=True, **options))
    run(target)
    assert output_of(adopted) == output_of(whole)


def test_preempted_sequences_go_on_in_their_grammar(grammars: Grammars) -> None:
    def outputs(**changes: int) -> tuple[list[list[int]], float]:
        engine = engine_with(grammars, **changes)
        sequences = [
            make_sequence(
                f"r{i}", prompt(8, i), grammar=WORDS, max_tokens=30, min_tokens=30, seed=i, temperature=1.0
            )
            for i in range(4)
        ]
        for sequence in sequences:
            engine.add(sequence)
        run(engine)
        return [output_of(sequence) for sequence in sequences], engine.counters()["preemptions_total"]

    expected, none = outputs()
    found, some = outputs(num_blocks=14)
    assert none == 0 < some
    assert found == expected


def test_a_grammar_that_is_complete_ends_the_output_before_min_tokens(grammars: Grammars) -> None:
    engine = engine_with(grammars)
    sequence = make_sequence(
        "r", prompt(5), grammar=LLMatcher.grammar_from_regex("no"), max_tokens=30, min_tokens=20
    )
    engine.add(sequence)
    ends = [output.finish_reason for output in run(engine) if output.finish_reason]
    assert ends == ["stop"]
    assert output_of(sequence) == [*ids("no"), EOS]


def test_a_worker_refuses_what_it_cannot_follow(grammars: Grammars) -> None:
    with pytest.raises(Refusal, match="unknown name"):
        engine_with(grammars).add(
            make_sequence("r", prompt(5), grammar=LLMatcher.grammar_from_lark("start: x"))
        )
    with pytest.raises(Refusal, match="not supported"):
        make_engine().add(make_sequence("r", prompt(5), grammar=WORDS))


def test_a_grammar_that_cannot_go_on_ends_its_own_sequence_and_no_other(grammars: Grammars) -> None:
    engine = engine_with(grammars)
    # What an earlier attempt is said to have put out is not in the grammar.
    astray = make_sequence("astray", [*prompt(5), *ids("q")], num_prompt_tokens=5, grammar=WORDS)
    fine = make_sequence("fine", prompt(5), grammar=WORDS)
    engine.add(astray)
    engine.add(fine)
    ends = {o.sequence.key.request_id: o for o in run(engine) if o.finish_reason}
    assert ends["astray"].error is not None
    assert ends["astray"].error.code == "invalid"
    assert ends["fine"].finish_reason == "length"
