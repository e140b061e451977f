"""The life of a reply: a Job becomes requests, their tokens become text, and text becomes what the client
reads.

    admitted     or refused with 429 when too many requests are under way
    waiting      for the first piece; what goes wrong until then is a proper HTTP error
    streaming    chunks as they come; what goes wrong now is an error event, and the end of the stream
    ended        by [DONE], or by the client, whose leaving aborts the requests on their workers

A client that shuts down its sending side has left, as far as HTTP servers of this kind can tell.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator

from starlette.types import Receive, Send

from proxy.chat_format import ChatFormat
from proxy.choice import Choice, Part
from proxy.completion_format import CompletionFormat
from proxy.errors import ApiError, from_worker
from proxy.formats import Envelope, Finished, Format, Usage
from proxy.frontend import Frontend
from proxy.job import Job
from proxy.merge import merge
from proxy.request import RequestFailed
from proxy.responses_format import ResponsesFormat

ROUTE = "X-Baton-Route"  # which workers, and what was predicted of them
IGNORED = "X-Baton-Ignored"  # names fields of the body that had no effect
SLOW_READER_S = 30.0  # past the deadline, for the client to read what is left

logger = logging.getLogger(__name__)


class Reply:
    def __init__(self, frontend: Frontend, job: Job, arrived_at: float) -> None:
        self._frontend = frontend
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + job.timeout_s
        self._sent_at = self._loop.time()
        self._choices = [
            Choice.of(job, index, frontend, arrived_at, self._deadline) for index in range(job.num_choices)
        ]
        self._format = _format_of(job, frontend)
        self._is_started = self._is_ended = False

    async def run(self, receive: Receive, send: Send) -> None:
        """The whole reply, or as much of it as the client stays for."""
        work, watch = asyncio.current_task(), asyncio.create_task(self._watch(receive, send))
        assert work is not None

        def leave(_: "asyncio.Task[None]") -> None:
            if not self._is_ended:
                work.cancel()

        watch.add_done_callback(leave)
        try:
            await self._run(send)
        except asyncio.CancelledError:
            if not watch.done() or work.uncancel():
                raise  # somebody else has cancelled this
            watch.result()
            self._count("aborted")
        finally:
            watch.remove_done_callback(leave)
            watch.cancel()

    async def _run(self, send: Send) -> None:
        """Everything the client gets, errors included."""
        try:
            with self._frontend.admit(self._job) as priority:
                for choice in self._choices:
                    choice.request.priority = priority
                async with asyncio.timeout_at(self._deadline + SLOW_READER_S):
                    await self._answer(send)
            self._count("success")
        except RequestFailed as failure:
            await self._fail(send, from_worker(failure.error, failure.retry_after_s))
        except ApiError as error:
            await self._fail(send, error)
        except TimeoutError:
            self._count("slow_reader")

    async def _answer(self, send: Send) -> None:
        self._loop.call_soon(self._count_prompts)  # while workers are at them
        parts = merge([choice.parts(self._frontend) for choice in self._choices])
        async with contextlib.aclosing(parts):
            await (self._stream(parts, send) if self._job.stream else self._send_whole(parts, send))

    async def _send_whole(self, parts: AsyncGenerator[Part, None], send: Send) -> None:
        finished = [Finished(choice.index) for choice in self._choices]
        async for choice, piece in parts:
            finished[choice.index].add(piece)
        for choice in self._choices:
            finished[choice.index].timings = choice.timings()
            finished[choice.index].prompt_logprobs = choice.request.prompt_logprobs
        await self._send_json(send, 200, self._format.whole(finished, self._usage()), {})

    async def _stream(self, parts: AsyncGenerator[Part, None], send: Send) -> None:
        silent = {choice.index for choice in self._choices}  # have told nothing yet
        num_open = len(self._choices)
        async for choice, piece in parts:
            if not self._is_started:
                await self._start_stream(send)
            timings = choice.timings() if piece.finish_reason and self._job.timings else None
            beginning = b""
            if choice.index in silent:
                silent.remove(choice.index)
                beginning = self._format.first_chunk(choice.index, choice.request.prompt_logprobs) or b""
            chunk = beginning + self._format.chunk(choice.index, piece, timings)
            if piece.finish_reason is not None:
                num_open -= 1
            if not num_open:  # goes out with what ends the stream
                chunk += self._format.end(self._usage())
            await self._send_body(send, chunk, more=num_open > 0)

    async def _start_stream(self, send: Send) -> None:
        await self._start(
            send, 200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        )

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Returns when the client leaves. Until then a silent stream gets comments, which clients skip, so
        that nobody on the way takes it for dead. The first comes before it is known whether there will be a
        reply: what goes wrong then is an event."""
        interval_s = self._frontend.config.stream_keep_alive_s if self._job.stream else 0.0
        while True:
            try:
                async with asyncio.timeout_at(self._sent_at + interval_s if interval_s else None):
                    message = await receive()
            except TimeoutError:
                if self._loop.time() >= self._sent_at + interval_s:
                    await self._send_comment(send)
                continue
            if message["type"] == "http.disconnect":
                return

    async def _send_comment(self, send: Send) -> None:
        if not self._is_started:
            await self._start_stream(send)
        await self._send_body(send, b": waiting\n\n", more=True)

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._count(error.code)
        if self._is_started:
            await self._send_body(send, self._format.failure(error), more=False)
        else:
            await self._send_json(send, error.status, error.encode(), error.headers)

    async def _send_json(self, send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
        told = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        told += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._start(send, status, told)
        await self._send_body(send, body, more=False)

    async def _send_body(self, send: Send, part: bytes, more: bool) -> None:
        if part or not more:
            self._sent_at = self._loop.time()
            self._is_ended = not more
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async def _start(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._is_started = True
        if route := self._choices[0].request.route_text():
            headers.append((ROUTE.lower().encode(), route.encode()))
        if (span := self._choices[0].span) is not None:
            headers.append((b"traceparent", span.traceparent.encode()))
        if self._job.ignored:
            names = [name for name in self._job.ignored if re.fullmatch(r"[\x21-\x7e]{1,64}", name)]
            headers.append((IGNORED.lower().encode(), ", ".join(names[:20]).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})

    def _usage(self) -> Usage:
        usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in self._job.prompts))
        usage.completion_tokens = sum(choice.text.num_tokens for choice in self._choices)
        for first in range(0, len(self._choices), self._job.n):
            siblings = self._choices[first : first + self._job.n]
            # The prompt is counted once, so what its first computation found in the cache counts.
            usage.cached_tokens += min(choice.request.num_cached_tokens for choice in siblings)
        return usage

    def _count_prompts(self) -> None:
        metrics = self._frontend.metrics
        for prompt in self._job.prompts:
            metrics.prompt_tokens.inc(len(prompt.token_ids))
            metrics.prompt_sizes.observe(len(prompt.token_ids))

    def _count(self, outcome: str) -> None:
        self._frontend.metrics.requests.labels(outcome).inc()


def _format_of(job: Job, frontend: Frontend) -> Format:
    tokenizer, model = frontend.model.tokenizer, frontend.model.name
    if job.endpoint == "chat":
        return ChatFormat(job, tokenizer, Envelope.new("chatcmpl", model))
    if job.endpoint == "responses":
        return ResponsesFormat(job, tokenizer, Envelope.new("resp", model, "_"))
    return CompletionFormat(job, tokenizer, Envelope.new("cmpl", model))
