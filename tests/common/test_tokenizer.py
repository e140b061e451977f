"""Text to tokens and back: the default model's tokenizer against the reference's ids, and streams against
wholes."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from common.chat_template import ChatTemplate
from common.model_config import ModelError
from common.model_source import resolve
from common.tokenizer import IncrementalDetokenizer, Tokenizer, byte_alphabet
from tests import golden

GOLDEN = golden.load()
exhaustive = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve("smollm2-135m-instruct").directory)


def stream(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("name", [name for name, prompt in GOLDEN.items() if prompt.messages is None])
def test_a_prompt_becomes_the_references_tokens(tokenizer: Tokenizer, name: str) -> None:
    text = GOLDEN[name].text
    assert text is not None
    assert tokenizer.encode(text) == GOLDEN[name].prompt_ids
    assert tokenizer.decode(GOLDEN[name].prompt_ids) == text


@pytest.mark.parametrize("name", [name for name, prompt in GOLDEN.items() if prompt.messages is not None])
def test_a_chat_becomes_the_references_tokens(tokenizer: Tokenizer, name: str) -> None:
    template = ChatTemplate.load(resolve("smollm2-135m-instruct").directory)
    messages = GOLDEN[name].messages
    assert template is not None
    assert messages is not None
    assert tokenizer.encode(template.render(messages), add_special_tokens=False) == GOLDEN[name].prompt_ids


@pytest.mark.parametrize("name", GOLDEN)
def test_generated_tokens_become_the_references_text(tokenizer: Tokenizer, name: str) -> None:
    prompt = GOLDEN[name]
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.output
    assert "".join(stream(tokenizer, prompt.token_ids, skip_special_tokens=False)) == prompt.output


@exhaustive
@given(text=st.text(max_size=80))
def test_any_text_comes_back_from_its_tokens_but_for_bytes_that_have_none(
    tokenizer: Tokenizer, text: str
) -> None:
    known = {byte for character, byte in byte_alphabet().items() if tokenizer.library.token_to_id(character)}
    assert known >= set(range(0x20, 0x7F)) | {0x0A}
    expected = bytes(byte for byte in text.encode() if byte in known).decode(errors="replace")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == expected


@exhaustive
@given(token_ids=st.lists(st.integers(0, 49_200), max_size=30), skip=st.booleans())
def test_a_stream_adds_up_to_the_whole(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    assert "".join(stream(tokenizer, token_ids, skip)) == tokenizer.decode(token_ids, skip)


@exhaustive
@given(token_ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_text_is_what_the_tokenizers_library_says(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    expected = tokenizer.library.decode(token_ids, skip_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == expected


def test_a_character_is_held_back_until_it_is_whole(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🙃")
    assert len(token_ids) > 1
    pieces = stream(tokenizer, token_ids)
    assert pieces == [""] * (len(token_ids) - 1) + ["🙃", ""]


def test_a_character_cut_off_by_the_end_is_one_replacement_character(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🙃")[:-1]
    assert stream(tokenizer, token_ids) == [""] * len(token_ids) + ["\ufffd"]
    assert tokenizer.decode(token_ids) == "\ufffd"


def test_special_tokens_are_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("Hello<|im_end|> you")
    assert tokenizer.eos_token_id in token_ids
    assert tokenizer.decode(token_ids) == "Hello you"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "Hello<|im_end|> you"


def test_tokens_tell_their_bytes_and_their_text(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("🙃")[0]
    assert "🙃".encode().startswith(tokenizer.token_bytes(first))
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert [tokenizer.token_bytes(absent) for absent in (-1, tokenizer.vocab_size, 1 << 40)] == [b""] * 3


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud83d")


def sentencepiece(directory: Path) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocabulary,
        merges=[("▁", "a"), ("▁a", "b")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(directory)


def test_sentencepiece_vocabularies_spell_spaces_and_bytes(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    token_ids = tokenizer.encode("ab b é")
    assert tokenizer.decode(token_ids) == "ab b é"
    assert tokenizer.decode(token_ids) == tokenizer.library.decode(token_ids)
    assert "".join(stream(tokenizer, token_ids)) == " ab b é"  # a continuation: its first space is part of it


def test_bos_is_put_first_and_never_twice(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    bos = tokenizer.bos_token_id
    assert bos == 1
    assert tokenizer.encode("a")[0] == bos
    assert tokenizer.encode("a")[1] != bos
    assert tokenizer.encode("<s>a").count(bos) == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != bos
    assert tokenizer.encode("<s><s>", add_special_tokens=False).count(bos) == 2


def test_named_special_tokens_are_found(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_way_of_spelling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="decoder WordPiece is not supported"):
        Tokenizer.load(tmp_path)


def test_truncation_set_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.enable_truncation(4)
    library.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("a long prompt")) == 13
