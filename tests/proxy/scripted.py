"""Workers without a model: what they say is written in the test, and goes over real sockets."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import zmq

from common.channel import ProxyChannel
from common.messages import (
    Abort,
    Drain,
    FinishReason,
    Generate,
    Layout,
    Load,
    ModelInfo,
    Outputs,
    Refused,
    Role,
    Status,
    TokenLogprob,
    Tokens,
    ToProxy,
    WorkerError,
)

WAIT_S = 20.0
HEARTBEAT_S = 0.05
LAYOUT = Layout(
    protocol_version=1,
    model_fingerprint="tiny",
    dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
)
MODEL = ModelInfo(name="tiny", fingerprint="tiny", vocab_size=300, max_model_len=4096)
LOAD = Load(
    num_waiting=0,
    num_running=0,
    num_queued_tokens=0,
    num_free_blocks=1000,
    num_blocks=1000,
    num_parked_blocks=0,
)


def status_of(role: Role, incarnation: str, **changes: object) -> Status:
    fields: dict[str, object] = {
        "incarnation": incarnation,
        "name": f"{role}-{incarnation}",
        "role": role,
        "address": f"inproc://{incarnation}" if role == "decode" else "",
        "pid": 1,
        "layout": LAYOUT,
        "model": MODEL,
        "load": LOAD,
    }
    return Status(**(fields | changes))  # type: ignore[arg-type]


class ScriptedWorker:
    """``script`` runs for every Generate, in a task of its own that an Abort cancels."""

    def __init__(self, address: str, role: Role, script: "Script | None" = None, **status: object) -> None:
        self.incarnation = uuid.uuid4().hex[:8]
        self.status = status_of(role, self.incarnation, **status)
        self.generates: list[Generate] = []
        self.aborts: list[Abort] = []
        self.refusals: list[str] = []
        self.num_drains = 0
        self.num_lost = 0
        self.num_said = 0
        self.num_taken_over = 0
        self.beats = True  # False: the worker is alive, but silent
        self.script = script
        self._channel = ProxyChannel(address, self.incarnation)
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def is_welcome(self) -> bool:
        return self._channel.proxy_incarnation is not None

    def say(
        self,
        generate: Generate,
        start: int,
        ids: "tuple[int, ...]",
        finish: FinishReason | None = None,
        **more: object,
    ) -> None:
        """Tokens of the request's output, the first of which has index ``start``."""
        logprobs: tuple[TokenLogprob, ...] = ()
        if generate.sampling.num_logprobs is not None:
            top = tuple((i, -float(i)) for i in range(generate.sampling.num_logprobs))
            logprobs = tuple(TokenLogprob(token_id, -0.5, top) for token_id in ids)
        num_prompt = generate.sampling.num_prompt_logprobs
        if num_prompt is not None and start == 0 and ids:
            prompt = generate.token_ids[1 : generate.num_prompt_tokens]
            top = tuple((i, -float(i)) for i in range(num_prompt))
            more = {"prompt_logprobs": tuple(TokenLogprob(i, -1.5, top) for i in prompt)} | more
        tokens = Tokens(
            generate.request_id,
            generate.attempt,
            start,
            ids,
            logprobs,
            finish,
            **more,  # type: ignore[arg-type]
        )
        self._channel.send(Outputs((tokens,)))
        self.num_said += 1
        self._changed.set()

    def send(self, message: ToProxy) -> None:
        self._channel.send(message)

    def take_over(self, generate: Generate) -> None:
        """As if a prefill worker had handed the request over."""
        self.num_taken_over += 1
        self._begin(generate)

    def break_connection(self) -> None:
        """As the network may; the worker connects again by itself."""
        if self._channel._socket is not None:
            with suppress(zmq.ZMQError):  # it is broken already
                self._channel._socket.disconnect(self._channel.address)

    def fail(self, generate: Generate, error: WorkerError) -> None:
        self.say(generate, 0, (), "error", error=error)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that this worker hears of."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._changed.wait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            while True:
                try:
                    message = await self._channel.receive()
                except ConnectionError:
                    self.num_lost += 1
                    self._stop_all()
                    continue
                match message:
                    case Generate():
                        self.generates.append(message)
                        self._begin(message)
                    case Abort():
                        self.aborts.append(message)
                        self._stop((message.request_id, message.attempt))
                    case Refused(reason=reason):
                        self.refusals.append(reason)
                    case Drain():
                        self.num_drains += 1
                self._changed.set()

    def close(self) -> None:
        """As if killed: connections break, nothing is said."""
        self._stop_all()
        self._channel.close()

    def _begin(self, generate: Generate) -> None:
        if self.script is not None:
            task = asyncio.create_task(_play(self.script, self, generate))
            self._running[generate.request_id, generate.attempt] = task

    def _stop(self, key: tuple[str, int]) -> None:
        if task := self._running.pop(key, None):
            task.cancel()

    def _stop_all(self) -> None:
        for key in list(self._running):
            self._stop(key)

    async def _beat(self) -> None:
        while True:
            if self.beats:
                with suppress(ConnectionError):
                    self._channel.send(self.status)
            self._changed.set()
            await asyncio.sleep(HEARTBEAT_S)


Script = Callable[[ScriptedWorker, Generate], Awaitable[None]]


async def _play(script: Script, worker: ScriptedWorker, generate: Generate) -> None:
    with suppress(ConnectionError):  # the worker or its proxy is gone: nobody listens
        await script(worker, generate)


@asynccontextmanager
async def running(worker: ScriptedWorker) -> AsyncIterator[ScriptedWorker]:
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.wait([task])
        worker.close()


def speaks(text: bytes, finish: FinishReason = "length") -> Script:
    """A decode worker that does everything itself: one message per token, as many as max_tokens allows. Its
    output is a function of the position alone, as a real worker's is of prompt and position."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        done = len(generate.token_ids) - generate.num_prompt_tokens
        end = min(len(text), generate.sampling.max_tokens)
        for index in range(done, end):
            worker.say(generate, index, (text[index],), finish if index == end - 1 else None)
            await asyncio.sleep(0)

    return script


def speaks_in_two(text: bytes, seen: asyncio.Event) -> Script:
    """The first token, and the others once the client has ``seen`` it: so there is time between two tokens,
    which may else arrive together."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, (text[0],))
        await seen.wait()
        worker.say(generate, 1, tuple(text[1:]), "length")

    return script


def answers(text: str, end: int = 256) -> Script:
    """A decode worker that says the text, one message per token, and then the token ``end``."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        tokens = (*text.encode(), end)
        done = len(generate.token_ids) - generate.num_prompt_tokens
        for index in range(done, len(tokens)):
            worker.say(generate, index, (tokens[index],), "stop" if index == len(tokens) - 1 else None)
            await asyncio.sleep(0)

    return script
