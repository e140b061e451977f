"""Output that follows a grammar: which tokens may come next.

An automaton has no state but the output tokens it has read, so whoever holds the tokens can make it again:
the decode worker after a hand-over, the next attempt after a failure, a sequence after its preemption.
Grammars are texts in the form that llguidance takes (``LLMatcher.grammar_from_*``), of JSON schemas, regular
expressions and context-free grammars alike.

Imports neither torch nor numpy: the proxy compiles every grammar too, before a worker hears of it.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from common.tokenizer import Tokenizer

MAX_KEPT = 64  # compiled grammars kept for the next request with the same one
# Bounds of one grammar, so that no text of a few bytes, such as (b{900}){1000}, holds up a step for longer
# than about half a second.
LIMITS = LLParserLimits(
    initial_lexer_fuel=250_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=10_000,  # of 2000 choices each takes one
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar that cannot be followed; the text says why."""


@dataclass(slots=True, eq=False)
class Automaton:
    """One sequence's way through its grammar."""

    matcher: LLMatcher
    eos_token_ids: frozenset[int]
    num_read: int = 0
    is_complete: bool = False  # only the end may come

    def read(self, output: Sequence[int]) -> None:
        """Take in what is new of ``output``, all tokens since the prompt."""
        for token_id in output[self.num_read :]:
            self.num_read += 1
            if self.is_complete:
                continue
            if not self.matcher.consume_token(token_id):
                raise GrammarError(f"the grammar cannot take token {token_id}: {_reason(self.matcher)}")
            self.is_complete = token_id in self.eos_token_ids or self.matcher.is_stopped()

    def mask(self) -> bytes:
        """One bit for each token that may come next, the lowest bit of a byte first. The end is among them
        where the output may end."""
        mask = self.matcher.compute_bitmask()
        if self.matcher.is_error() or not any(mask):
            raise GrammarError(_reason(self.matcher))
        return mask

    def probe(self) -> None:
        """Take one step that the grammar allows: what no output fits, or what is too large to be followed,
        shows then. Raises GrammarError."""
        mask = self.mask()
        byte = next(index for index, bits in enumerate(mask) if bits)
        self.read([8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1])


@dataclass(slots=True)
class Grammars:
    """Grammars over one vocabulary. Reading the vocabulary takes a second: it is done once, in a thread of
    its own. All methods may be called from any thread."""

    tokenizer: Tokenizer
    vocab_size: int  # rows of the model's embedding
    eos_token_ids: frozenset[int]
    _vocabulary: "Future[LLTokenizer]" = field(default_factory=Future)
    _compiled: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_reading: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> "Grammars":
        return cls(tokenizer, vocab_size, frozenset(eos_token_ids))

    def prepare(self) -> None:
        """Begin to read the vocabulary, if nobody has yet."""
        with self._lock:
            if self._is_reading:
                return
            self._is_reading = True
        threading.Thread(target=self._read_vocabulary, name="grammars", daemon=True).start()

    def compile(self, grammar: str) -> Automaton:
        """Raises GrammarError."""
        if not self.eos_token_ids:
            raise GrammarError("the model has no token that ends an output")
        self.prepare()
        vocabulary = self._vocabulary.result()
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarError(_reason(matcher))
            Automaton(matcher.deep_copy(), self.eos_token_ids).probe()
            self._keep(grammar, matcher)
        return Automaton(matcher.deep_copy(), self.eos_token_ids)

    def is_known(self, grammar: str) -> bool:
        """Whether compiling it takes no time."""
        with self._lock:
            return grammar in self._compiled

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)

    def _read_vocabulary(self) -> None:
        try:
            source = TokenizerWrapper(Vocabulary(self))
            ends = sorted(self.eos_token_ids)
            self._vocabulary.set_result(LLTokenizer(source, self.vocab_size, ends))
        except Exception as error:  # noqa: BLE001 (raised again by whoever waits for the result)
            self._vocabulary.set_exception(error)


def _reason(matcher: LLMatcher) -> str:
    """Why it has stopped."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "no output fits the grammar" if text in ("", "NoExtensionBias") else text


class Vocabulary:
    """A Tokenizer as llguidance wants to see one."""

    def __init__(self, grammars: Grammars) -> None:
        self._tokenizer = grammars.tokenizer
        self.eos_token_id = min(grammars.eos_token_ids)
        self.bos_token_id = self._tokenizer.bos_token_id
        self.tokens = [self._tokenizer.work_out_bytes(index) for index in range(grammars.vocab_size)]
        special = {index for index in self._tokenizer.special_ids if index < grammars.vocab_size}
        self.special_token_ids = sorted(special)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
