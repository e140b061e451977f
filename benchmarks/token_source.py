"""A decode worker without a model, for measuring what stands in front of it.

    python -m benchmarks.token_source CONTROL_ADDRESS TOKENS_PER_S

Every request gets max_tokens tokens: one a step for all requests under way, as an engine would tell them, at
TOKENS_PER_S steps a second, or without pause where that is 0.
"""

import asyncio
import os
import sys
import uuid
from contextlib import suppress

import uvloop

from common.channel import ProxyChannel
from common.config import DEFAULT_MODEL
from common.messages import Abort, Generate, Layout, Load, ModelInfo, Outputs, Status, TokenLogprob, Tokens
from common.model_source import resolve

HEARTBEAT_S = 0.25
FIRST_TOKEN_ID = 1000  # of words, in the default model's vocabulary
NUM_WORDS = 512


class TokenSource:
    def __init__(self, address: str, steps_per_s: float) -> None:
        self._incarnation = uuid.uuid4().hex
        self._channel = ProxyChannel(address, self._incarnation)
        self._interval_s = 1 / steps_per_s if steps_per_s else 0.0
        self._running: dict[str, tuple[Generate, int]] = {}  # and the number of tokens told
        self._work = asyncio.Event()
        self._status = status(self._incarnation)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._step_for_ever())
            while True:
                with suppress(ConnectionError):
                    self._take(await self._channel.receive())

    def _take(self, message: object) -> None:
        if isinstance(message, Generate):
            self._running[message.request_id] = message, 0
            self._work.set()
        elif isinstance(message, Abort):
            self._running.pop(message.request_id, None)

    async def _step_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
            began = loop.time()
            outputs = tuple(self._next(generate, told) for generate, told in list(self._running.values()))
            with suppress(ConnectionError):
                self._channel.send(Outputs(outputs))
            await asyncio.sleep(max(0.0, began + self._interval_s - loop.time()))

    def _next(self, generate: Generate, told: int) -> Tokens:
        is_last = told + 1 >= generate.sampling.max_tokens
        if is_last:
            del self._running[generate.request_id]
        else:
            self._running[generate.request_id] = generate, told + 1
        word, num_top = FIRST_TOKEN_ID + told % NUM_WORDS, generate.sampling.num_logprobs
        top = tuple((FIRST_TOKEN_ID + rank, -1.0 - rank) for rank in range(num_top or 0))
        return Tokens(
            generate.request_id,
            generate.attempt,
            told,
            (word,),
            () if num_top is None else (TokenLogprob(word, -1.0, top),),
            "length" if is_last else None,
        )

    async def _beat(self) -> None:
        while True:
            with suppress(ConnectionError):
                self._channel.send(self._status)
            await asyncio.sleep(HEARTBEAT_S)


def status(incarnation: str) -> Status:
    model = ModelInfo(DEFAULT_MODEL, resolve(DEFAULT_MODEL).fingerprint, 49152, 8192)
    layout = Layout(1, model.fingerprint, "float32", 1, 1, 8, 16)
    load = Load(0, 0, 0, 100_000, 100_000, 0)
    return Status(incarnation, "source", "decode", "inproc://source", os.getpid(), layout, model, load)


async def main() -> None:
    await TokenSource(sys.argv[1], float(sys.argv[2])).run()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(main())
