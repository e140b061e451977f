"""Tokenizers made from GGUF metadata: how each pre-tokenizer cuts a text, and SentencePiece's scores as
merges."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from common.gguf_tokenizer import end_token_ids, tokenizer_config_json, tokenizer_json
from common.model_config import ModelError
from common.tokenizer import byte_alphabet

TEXT = "It's 2024,\n\n  naïve"
CUTS = {
    "gpt-2": ["It", "'s", " 2024", ",", "\n\n ", " naïve"],
    "smollm": ["It", "'s", " ", "2", "0", "2", "4", ",", "\n\n ", " naïve"],
    "llama-bpe": ["It", "'s", " ", "202", "4", ",\n\n", " ", " naïve"],
    "qwen2": ["It", "'s", " ", "2", "0", "2", "4", ",\n\n", " ", " naïve"],
}


def build(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(getter(metadata), "test.gguf")))


def getter(metadata: dict[str, Any]) -> Callable[..., Any]:
    full = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return lambda key, default=None: full.get(key, default)


def byte_level(**changes: Any) -> dict[str, Any]:
    alphabet = list(byte_alphabet())
    tokens = [*alphabet, "he", "hey", "<|begin|>", "<|end|>", "<tool>"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(alphabet) + 2) + [3, 3, 4],
        "merges": ["h e", "he y"],
        "bos_token_id": len(alphabet) + 2,
        "eos_token_id": len(alphabet) + 3,
    } | changes


def pieces(**changes: Any) -> dict[str, Any]:
    """Pieces whose best joints are not the leftmost: scores decide."""
    joined = {"ab": -5.0, "bc": -1.0, "abc": -9.0, "▁a": -7.0, "é": -20.0}
    letters = ["▁", "a", "b", "c"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *letters]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(joined.values()) + [-30.0] * len(letters),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(joined) + len(letters)),
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


@pytest.mark.parametrize("name", CUTS)
def test_each_pre_tokenizer_cuts_where_the_models_own_does(name: str) -> None:
    library = build(byte_level(pre=name))
    assert library.pre_tokenizer is not None
    assert [TEXT[start:end] for _, (start, end) in library.pre_tokenizer.pre_tokenize_str(TEXT)] == CUTS[name]


def test_merges_and_special_tokens_are_those_of_the_file() -> None:
    library = build(byte_level())
    assert library.encode("hey<|end|>he").tokens == ["hey", "<|end|>", "he"]
    assert library.encode("<tool>").tokens == ["<tool>"]
    flags = {token.content: token.special for token in library.get_added_tokens_decoder().values()}
    assert flags == {"<|begin|>": True, "<|end|>": True, "<tool>": False}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["hey"]),
        ({"add_bos_token": True}, ["<|begin|>", "hey"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|begin|>", "hey", "<|end|>"]),
        ({"pre": "llama-bpe"}, ["<|begin|>", "hey"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["hey"]),
    ],
)
def test_texts_begin_and_end_as_the_file_says(changes: dict[str, Any], expected: list[str]) -> None:
    assert build(byte_level(**changes)).encode("hey").tokens == expected


def test_qwen_composes_characters_first() -> None:
    composed = build(byte_level(pre="qwen2")).encode("e\u0301").ids
    assert composed == build(byte_level(pre="qwen2")).encode("é").ids
    assert composed != build(byte_level(pre="gpt-2")).encode("e\u0301").ids


def test_sentencepiece_joins_what_scores_best() -> None:
    assert build(pieces()).encode("abc").tokens == ["<s>", "▁a", "bc"]


def test_sentencepiece_spells_unknown_characters_in_bytes() -> None:
    assert build(pieces()).encode("aé漢").tokens == ["<s>", "▁a", "é", "<0xE6>", "<0xBC>", "<0xA2>"]


def test_sentencepiece_puts_a_space_first_unless_told_otherwise() -> None:
    assert build(pieces(add_space_prefix=False)).encode("abc").tokens == ["<s>", "abc"]


def test_ends_of_a_reply_are_all_that_the_file_names() -> None:
    named = {"eos_token_id": 5, "eot_token_id": 7, "eom_token_id": 5}
    assert end_token_ids(getter(named)) == [5, 7]


def test_a_special_token_that_is_not_in_the_vocabulary_is_named() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.eos_token_id is 9999, but there are \d+ tokens"):
        tokenizer_config_json(getter(byte_level(eos_token_id=9999)))


def test_settings_name_the_special_tokens_and_the_template() -> None:
    metadata = {"tokenizer.chat_template": "{{ messages }}"}
    described = getter(byte_level(unknown_token_id=0))
    settings = tokenizer_config_json(lambda key, default=None: metadata.get(key, described(key, default)))
    assert settings == {
        "chat_template": "{{ messages }}",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "unk_token": "!",
    }
