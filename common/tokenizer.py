"""Text to token ids and back.

Decoding is done here, from each token's bytes, and not by the ``tokenizers`` library: its decoders take a
whole list of ids, so a stream would decode its text again for every token. A token stands for the same bytes
wherever it is, so text is what the joined bytes say in UTF-8, and a stream cut anywhere adds up to the text
of the whole.
"""

import codecs
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from common.model_config import ModelError, read_json

ToBytes = Callable[[str], bytes]
Utf8Decoder = codecs.getincrementaldecoder("utf-8")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    def __init__(self, library: tokenizers.Tokenizer, to_bytes: ToBytes, special: dict[str, str]) -> None:
        self.library = library
        self.to_bytes = to_bytes
        self.special_tokens = special  # text by name: bos_token, eos_token, unk_token, pad_token
        added = library.get_added_tokens_decoder()
        self.added = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.bos_token_id = self.id_of("bos_token")
        self.eos_token_id = self.id_of("eos_token")
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.bytes_by_id: dict[int, bytes] = {}
        self.puts_space_first = any(strips_space(part) for part in decoder_parts(library))

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """From tokenizer.json and, where there is one, tokenizer_config.json."""
        path = directory / "tokenizer.json"
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
        library.no_truncation()
        library.no_padding()
        settings = directory / "tokenizer_config.json"
        special = special_tokens(read_json(settings)) if settings.is_file() else {}
        return cls(library, bytes_of_tokens(library, path), special)

    def id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.library.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens named in ``text`` become those tokens. A text that begins with BOS gets no second
        one. ``ValueError`` for text that is not valid Unicode."""
        try:
            ids: list[int] = self.library.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):  # the library calls such a text no text
            raise ValueError("the text holds half of a surrogate pair, which is no character") from None
        doubled = add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole list of tokens: without the space that a SentencePiece tokenizer puts before a
        text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        kept = (self.token_bytes(token) for token in token_ids if token not in skipped)
        text = b"".join(kept).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.puts_space_first else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; none for an id without a token (models pad their
        vocabulary)."""
        found = self.bytes_by_id.get(token_id)
        if found is None:
            found = self.bytes_by_id[token_id] = self.work_out_bytes(token_id)
        return found

    def work_out_bytes(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        token = self.library.id_to_token(token_id) if 0 <= token_id < 1 << 31 else None
        return b"" if token is None else self.to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """The token alone; bytes that are no whole character come as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


class IncrementalDetokenizer:
    """The text of a growing list of tokens; a character cut by the end of the list is held back until it is
    whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.token_bytes = tokenizer.token_bytes
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self.decoder = Utf8Decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that are whole now and were not before."""
        if token_id in self.skipped:
            return ""
        return self.decoder.decode(self.token_bytes(token_id))

    def flush(self) -> str:
        """What was held back, at the end: U+FFFD for half a character."""
        return self.decoder.decode(b"", final=True)


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Text of the special tokens that tokenizer_config.json names, as a string or as an object with
    ``content``."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def bytes_of_tokens(library: tokenizers.Tokenizer, path: Path) -> ToBytes:
    """How a vocabulary entry spells bytes, told from the decoder in tokenizer.json."""
    kinds = [part["type"] for part in decoder_parts(library)]
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()
        return lambda token: bytes(alphabet[character] for character in token)
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return piece_bytes
    raise ModelError(
        f"{path}: decoder {'+'.join(kinds)} is not supported, only ByteLevel, ByteFallback and Metaspace"
    )


def decoder_parts(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(library.decoder.__getstate__()) if library.decoder else {"type": "none"}
    parts: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return parts


def strips_space(part: dict[str, Any]) -> bool:
    kind = part["type"]
    return kind == "Strip" or (kind == "Metaspace" and part.get("prepend_scheme") != "never")


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in a byte-level vocabulary: a printable byte for itself, the
    others, in order, for the characters from U+0100 on (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def piece_bytes(token: str) -> bytes:
    """SentencePiece: ``<0x0A>`` is a byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
