"""Every message that crosses a process border, defined once.

Three conversations, each a tagged union:

- proxy -> worker: ``Generate``, ``Abort``, ``Welcome``, ``Refused``, ``Ping``, ``Drain``
- worker -> proxy: ``Status``, ``Outputs``, ``BlocksStored``, ``BlocksRemoved``
- prefill <-> decode: ``Hello`` / ``Welcome`` / ``Refused`` when two workers meet, then ``Offer``, ``Blocks``,
  ``Handover``, ``Cancel`` one way and ``Accept``, ``Refuse``, ``Credit``, ``Landed``, ``Failed`` back

On the wire a message is a MessagePack map with its tag under ``type``; the plain ``msgpack`` package reads
it. ``decode_*`` raises ``MessageError`` naming the field when a peer sends something else: nothing received
is trusted.
"""

from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

PROTOCOL_VERSION = 4

FinishReason = Literal["stop", "length", "abort", "error"]
Role = Literal["prefill", "decode"]
ErrorCode = Literal[
    "invalid",  # the request can never be served here; the client must change it
    "overloaded",  # queues or pool are full; another worker or a later try may do
    "deadline",  # the request's time is up
    "peer_lost",  # the other half of the pair died, stalled or refused; try another pair
    "draining",  # the worker takes no new work
    "internal",  # a bug of ours
]


class MessageError(ValueError):
    """A message that is not what the protocol says; the text names the field."""


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen and when to stop. Validated by the proxy; workers take it as it is."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # always set (the proxy draws one), so that a retry draws the same tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""  # that the output must follow, as common/grammar.py takes it; empty: none
    num_prompt_logprobs: int | None = None  # alternatives per prompt token; None: none at all
    num_logprobs: int | None = None  # alternatives per token; 0: only the chosen token; None: none at all


class DecodeTarget(Struct, frozen=True):
    """The decode worker that a prefill worker hands over to."""

    address: str  # transfer URL, e.g. zmq+tcp://10.0.0.2:7001
    incarnation: str


class Generate(Struct, frozen=True, tag=True, omit_defaults=True):
    """One attempt at a request. A retry is the same with the tokens sent so far appended to ``token_ids``."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]  # prompt, then the output tokens of earlier attempts
    num_prompt_tokens: int
    proxy: str  # incarnation of the proxy that wants the tokens
    sampling: Sampling  # max_tokens counts from num_prompt_tokens, earlier attempts included
    decode: DecodeTarget | None = None  # none: this worker does both halves
    deadline_s: float = 600.0  # time left when sent (relative: clocks of two hosts differ)
    priority: int = 0  # lower is served first
    cache_salt: str = ""
    trace: str = ""  # W3C traceparent


class Abort(Struct, frozen=True, tag=True):
    request_id: str
    attempt: int


class Welcome(Struct, frozen=True, tag=True):
    """The other side is compatible and knows us. ``incarnation`` is the sender's."""

    incarnation: str


class Refused(Struct, frozen=True, tag=True):
    """The other side will not work with us; ``reason`` names the field that differs."""

    reason: str


class Ping(Struct, frozen=True, tag=True):
    """Sent on a timer so that each side can tell a silent peer from a dead one."""

    incarnation: str


class Drain(Struct, frozen=True, tag=True):
    """Take no new work, finish or hand over what is under way."""


class TokenLogprob(Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


class WorkerError(Struct, frozen=True):
    code: ErrorCode
    message: str
    origin: Role | None = None  # whose error it is, where another worker passes it on

    @property
    def retryable(self) -> bool:
        """Whether another attempt, elsewhere or later, may succeed."""
        return self.code in ("overloaded", "peer_lost", "draining", "internal")


class Refusal(Exception):
    """A worker will not take a sequence; ``error`` says why, in the form that goes back to the proxy."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = WorkerError(code, message)


class Tokens(Struct, frozen=True, omit_defaults=True):
    """New output tokens of one attempt. ``start`` is the index of the first one in the request's output, so
    that the receiver can put messages of two workers in order and drop what it has already."""

    request_id: str
    attempt: int
    start: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: WorkerError | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache by the worker that did the prefill
    timings: dict[str, float] = {}  # seconds by mark name, see common/timings.py
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of prompt tokens from the second, with the first output


class Outputs(Struct, frozen=True, tag=True):
    """What one step produced for the requests of one proxy."""

    tokens: tuple[Tokens, ...]


class Layout(Struct, frozen=True):
    """What two caches must agree on before a block may move between them."""

    protocol_version: int
    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tensor_parallel_size: int = 1
    weights: str = ""  # what they are computed as, e.g. bfloat16 or bfloat16/int8: else tokens differ

    def difference(self, other: "Layout") -> str | None:
        """The first field in which the two differ, with both values; None when blocks can move between
        them."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field}: {ours!r} here, {theirs!r} there"
        return None


class ModelInfo(Struct, frozen=True):
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int


class Load(Struct, frozen=True):
    num_waiting: int
    num_running: int
    num_queued_tokens: int  # tokens not yet computed of waiting and running sequences
    num_free_blocks: int  # free or cached and evictable
    num_blocks: int
    num_parked_blocks: int  # computed, waiting for a decode worker to take them
    num_receiving: int = 0  # transfers under way into this worker


class Pace(Struct, frozen=True):
    """How fast an engine has been lately; 0: not known yet."""

    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0  # of steps that computed one token for each of their sequences


class Histogram(Struct, frozen=True, array_like=True):
    """Values counted in the buckets that common/metrics.py defines for its name."""

    counts: tuple[int, ...]  # of each bucket alone, the last one for what is above all bounds
    total: float  # sum of the values


class Status(Struct, frozen=True, tag=True):
    """Heartbeat of a worker; the first one registers it."""

    incarnation: str
    name: str
    role: Role
    address: str  # where other workers reach its transfer listener; empty for prefill workers
    pid: int
    layout: Layout
    model: ModelInfo
    load: Load
    draining: bool = False
    max_sequence_tokens: int = 0  # the longest sequence (prompt and output) its pool can ever hold
    counters: dict[str, float] = {}  # totals since start, by metric name or name:label
    gauges: dict[str, float] = {}  # by metric name
    histograms: dict[str, Histogram] = {}  # since start, by metric name
    pace: Pace = Pace()
    block_bytes: int = 0
    links: dict[str, float] = {}  # bytes/s to decode workers, by their incarnation, as measured lately
    locality: dict[str, str] = {}  # where it runs, such as {"host": "a", "rack": "b"}
    seat: str = ""  # its cores, in a name that all who have these and no others share; empty: not told


class BlocksStored(Struct, frozen=True, tag=True, omit_defaults=True):
    """These blocks can be found in the worker's prefix cache from now on."""

    block_hashes: tuple[bytes, ...]
    is_first: bool = False  # of a session: what was told before is void


class BlocksRemoved(Struct, frozen=True, tag=True):
    """These blocks are not in the worker's prefix cache any more."""

    block_hashes: tuple[bytes, ...]


class Hello(Struct, frozen=True, tag=True):
    """First message on a connection from a prefill to a decode worker."""

    incarnation: str
    expected_incarnation: str  # whom we mean to talk to: an address is not an identity
    layout: Layout


class Offer(Struct, frozen=True, tag=True):
    """A prompt is about to be prefilled: make room for its blocks."""

    transfer_id: str
    request_id: str
    attempt: int
    num_tokens: int  # tokens whose KV will come
    block_hashes: tuple[bytes, ...]  # of the full blocks
    deadline_s: float
    priority: int = 0  # lower is given room first


class Accept(Struct, frozen=True, tag=True):
    transfer_id: str
    skip_blocks: int  # leading blocks the receiver holds already
    credit_bytes: int  # of blocks that may be in flight, not yet answered by Credit


class Refuse(Struct, frozen=True, tag=True):
    transfer_id: str
    error: WorkerError


class Blocks(Struct, frozen=True, tag=True):
    """A run of blocks, or some layers of each; the payload follows it on the connection."""

    transfer_id: str
    first: int  # index in the sequence's blocks
    count: int
    wants_answer: bool = True  # a Credit; not where more follows at once
    on_device: bool = False  # sent block by block from a device's memory
    layers: tuple[int, int] | None = None  # from and up to; None: all. Those of a block come in order
    checksum: bytes | None = None  # of what is sent from a device; the transport guards the rest


class Credit(Struct, frozen=True, tag=True):
    """What has landed so far, all in all: the sender may have ``credit_bytes`` more in flight."""

    transfer_id: str
    landed_bytes: int


class Handover(Struct, frozen=True, tag=True):
    """All blocks were sent: the receiver continues the sequence. ``generate`` carries what it needs to go on:
    prompt, sampling and seed; ``token_ids`` and ``logprobs`` are what the sender sampled, told to the proxy
    already."""

    transfer_id: str
    generate: Generate
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    timings: dict[str, float] = {}


class Landed(Struct, frozen=True, tag=True):
    """The receiver has taken the sequence over; the sender's blocks are free."""

    transfer_id: str


class Failed(Struct, frozen=True, tag=True):
    """The receiver gave the transfer up; nothing of it will be used."""

    transfer_id: str
    error: WorkerError


class Cancel(Struct, frozen=True, tag=True):
    """The sender gave the transfer up."""

    transfer_id: str
    reason: str


ToWorker = Generate | Abort | Welcome | Refused | Ping | Drain
ToProxy = Status | Outputs | BlocksStored | BlocksRemoved
Transfer = (
    Hello
    | Welcome
    | Refused
    | Offer
    | Accept
    | Refuse
    | Blocks
    | Credit
    | Handover
    | Landed
    | Failed
    | Cancel
    | Ping
)

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_proxy: msgspec.msgpack.Decoder[ToProxy] = msgspec.msgpack.Decoder(ToProxy)
_transfer: msgspec.msgpack.Decoder[Transfer] = msgspec.msgpack.Decoder(Transfer)

Buffer = bytes | bytearray | memoryview
Message = TypeVar("Message")


def encode(message: ToWorker | ToProxy | Transfer) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(data: Buffer) -> ToWorker:
    return _decode(_to_worker, data)


def decode_to_proxy(data: Buffer) -> ToProxy:
    return _decode(_to_proxy, data)


def decode_transfer(data: Buffer) -> Transfer:
    return _decode(_transfer, data)


def _decode(decoder: "msgspec.msgpack.Decoder[Message]", data: Buffer) -> Message:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message of this protocol: {error}") from error
