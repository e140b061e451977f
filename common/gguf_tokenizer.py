"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Two kinds of vocabulary: ``gpt2`` (byte-level BPE: tokens, merges and the name of a pre-tokenizer) and
``llama`` (SentencePiece: pieces with scores, unknown characters as byte tokens).
"""

from collections.abc import Callable, Iterator
from typing import Any

from common.model_config import ModelError

Get = Callable[..., Any]  # metadata value by key, with an optional default

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types
WORDS = (  # the pattern of Llama 3's tokenizer; Qwen 2's differs in the length of runs of digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "smollm": "digits",
    "gpt-2": "gpt2",
    "default": "gpt2",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def end_token_ids(get: Get) -> list[int]:
    """Tokens that end a reply: those the metadata names. Files often name one of several."""
    return list(dict.fromkeys(token for key in END_KEYS if (token := get(key)) is not None))


def tokenizer_json(get: Get, source: str) -> dict[str, Any]:
    """``ModelError`` naming ``source`` for a kind of vocabulary or a pre-tokenizer that is not supported."""
    kind = get("tokenizer.ggml.model")
    if get("tokenizer.ggml.tokens") is None:
        raise ModelError(f"{source}: metadata key tokenizer.ggml.tokens is missing")
    if kind == "gpt2":
        parts = byte_level_parts(get, source)
    elif kind == "llama":
        parts = sentencepiece_parts(get, source)
    else:
        raise ModelError(f"{source}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(get),
        "post_processor": post_processor(get, kind),
        **parts,
    }


def added_tokens(get: Get) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else is split."""
    tokens = get("tokenizer.ggml.tokens")
    kinds = get("tokenizer.ggml.token_type") or []
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": tokens[index], "special": kind != USER_DEFINED, **flags}
        for index, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def byte_level_parts(get: Get, source: str) -> dict[str, Any]:
    name = get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{source}: pre-tokenizer {name!r} is not supported; supported: {supported}")
    style = PRE_TOKENIZERS[name]
    merges = get("tokenizer.ggml.merges")
    if not merges:
        raise ModelError(f"{source}: metadata key tokenizer.ggml.merges is missing")
    return {
        "normalizer": {"type": "NFC"} if style == "qwen2" else None,
        "pre_tokenizer": pre_tokenizer(style),
        "decoder": byte_level(False),
        "model": bpe(get("tokenizer.ggml.tokens"), merges, ignore_merges=style == "llama3"),
    }


def bpe(tokens: list[str], merges: Any, **options: Any) -> dict[str, Any]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unused = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **unused, **flags, **options, "vocab": vocabulary, "merges": merges}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def pre_tokenizer(style: str) -> dict[str, Any]:
    if style == "gpt2":
        return byte_level(True)
    if style == "digits":
        return {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
        }
    pattern = {"Regex": WORDS % ("{1,3}" if style == "llama3" else "")}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level(False)]}


def sentencepiece_parts(get: Get, source: str) -> dict[str, Any]:
    tokens, scores = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(
            f"{source}: tokenizer.ggml.scores must hold a number for each of {len(tokens)} tokens"
        )
    space_first = get("tokenizer.ggml.add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": "▁"}] if space_first else []
    to_underline = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_first else []
    merges = merges_by_score(tokens, scores, get("tokenizer.ggml.token_type"))
    unknown = token_named(get, "unknown") or tokens[0]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_underline]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def merges_by_score(tokens: list[str], scores: list[float], kinds: list[int] | None) -> list[list[str]]:
    """SentencePiece joins the neighbours whose joint piece scores best; as BPE merges that is every way to
    cut a piece in two, best pieces first."""
    vocabulary = frozenset(tokens)
    normal = [index for index in range(len(tokens)) if kinds is None or kinds[index] == NORMAL]
    normal.sort(key=lambda index: -scores[index])
    return [pair for index in normal for pair in cuts(tokens[index], vocabulary)]


def cuts(token: str, vocabulary: frozenset[str]) -> Iterator[list[str]]:
    for at in range(1, len(token)):
        if token[:at] in vocabulary and token[at:] in vocabulary:
            yield [token[:at], token[at:]]


def post_processor(get: Get, kind: str) -> dict[str, Any] | None:
    """Puts the tokens that begin and end every text in place."""
    llama3 = PRE_TOKENIZERS.get(get("tokenizer.ggml.pre", "")) == "llama3"
    first = (
        token_named(get, "bos") if get("tokenizer.ggml.add_bos_token", kind == "llama" or llama3) else None
    )
    last = token_named(get, "eos") if get("tokenizer.ggml.add_eos_token", False) else None
    if first is None and last is None:
        return None
    pieces = [("SpecialToken", first), ("Sequence", "A"), ("SpecialToken", last)]
    single = [{kind: {"id": name, "type_id": 0}} for kind, name in pieces if name is not None]
    tokens = get("tokenizer.ggml.tokens")
    special = {
        token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
        for token in (first, last)
        if token
    }
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


def token_named(get: Get, name: str) -> str | None:
    """Text of the bos, eos, unknown or padding token, if the file names one."""
    tokens, index = get("tokenizer.ggml.tokens"), get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(f"tokenizer.ggml.{name}_token_id is {index}, but there are {len(tokens)} tokens")
    return str(tokens[index])


def tokenizer_config_json(get: Get) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {key: token for key, name in names.items() if (token := token_named(get, name)) is not None}
    return {"chat_template": get("tokenizer.chat_template"), **named}
