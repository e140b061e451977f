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

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


class Reply(Response):
    """Runs the job while the client is there."""

    def __init__(self, frontend: Frontend, job: Job, arrived_at: float) -> None:
        super().__init__()
        self._frontend = frontend
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + job.timeout_s
        self._sent_at = self._loop.time()
        self._keeps_alive = frontend.config.stream_keep_alive_s > 0
        self._choices = [
            Choice.of(job, index, frontend, arrived_at, self._deadline) for index in range(job.num_choices)
        ]
        self._format = _format_of(job, frontend)
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.wait([work, watch])
        if work.cancelled():
            self._count("aborted")
        else:
            work.result()

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
        metrics = self._frontend.metrics
        for prompt in self._job.prompts:
            metrics.prompt_tokens.inc(len(prompt.token_ids))
            metrics.prompt_sizes.observe(len(prompt.token_ids))
        parts = merge([choice.parts(self._frontend) for choice in self._choices])
        async with contextlib.aclosing(parts):
            if not self._job.stream:
                await self._send_whole(parts, send)
                return
            keeper = asyncio.create_task(self._keep_alive(send)) if self._keeps_alive else None
            try:
                await self._stream(parts, send)
            finally:
                if keeper is not None:
                    keeper.cancel()

    async def _send_whole(self, parts: AsyncGenerator[Part, None], send: Send) -> None:
        finished = [Finished(choice.index) for choice in self._choices]
        async for choice, piece in parts:
            finished[choice.index].add(piece)
        for choice in self._choices:
            finished[choice.index].timings = choice.timings()
            finished[choice.index].prompt_logprobs = choice.request.prompt_logprobs
        body = self._format.whole(finished, self._usage())
        await self._start(send, 200, "application/json", {"Content-Length": str(len(body))})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, parts: AsyncGenerator[Part, None], send: Send) -> None:
        silent = {choice.index for choice in self._choices}  # have told nothing yet
        async for choice, piece in parts:
            if not self._is_started:
                await self._start_stream(send)
            self._sent_at = self._loop.time()
            timings = choice.timings() if piece.finish_reason and self._job.timings else None
            beginning = b""
            if choice.index in silent:
                silent.remove(choice.index)
                beginning = self._format.first_chunk(choice.index, choice.request.prompt_logprobs) or b""
            chunk = beginning + self._format.chunk(choice.index, piece, timings)
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": self._format.end(self._usage())})

    async def _start_stream(self, send: Send) -> None:
        await self._start(send, 200, "text/event-stream", {"Cache-Control": "no-cache"})

    async def _keep_alive(self, send: Send) -> None:
        """Comments, which clients skip, so that nobody on the way takes a silent stream for a dead one. The
        first comes before it is known whether there will be a reply: what goes wrong then is an event."""
        interval_s = self._frontend.config.stream_keep_alive_s
        while True:
            await asyncio.sleep(self._sent_at + interval_s - self._loop.time())
            if self._loop.time() < self._sent_at + interval_s:
                continue
            self._sent_at = self._loop.time()
            if not self._is_started:
                await self._start_stream(send)
            await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._count(error.code)
        if self._is_started:
            await send({"type": "http.response.body", "body": self._format.failure(error)})
            return
        body = error.encode()
        await self._start(
            send, error.status, "application/json", {"Content-Length": str(len(body))} | error.headers
        )
        await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Send, status: int, content_type: str, headers: dict[str, str]) -> None:
        self._is_started = True
        headers = {"Content-Type": content_type} | headers
        if route := self._choices[0].request.route_text():
            headers[ROUTE] = route
        if (span := self._choices[0].span) is not None:
            headers["traceparent"] = span.traceparent
        ignored = [name for name in self._job.ignored if re.fullmatch(r"[\x21-\x7e]{1,64}", name)]
        if ignored:
            headers[IGNORED] = ", ".join(ignored[:20])
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    def _usage(self) -> Usage:
        usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in self._job.prompts))
        usage.completion_tokens = sum(choice.text.num_tokens for choice in self._choices)
        for first in range(0, len(self._choices), self._job.n):
            siblings = self._choices[first : first + self._job.n]
            # The prompt is counted once, so what its first computation found in the cache counts.
            usage.cached_tokens += min(choice.request.num_cached_tokens for choice in siblings)
        return usage

    def _count(self, outcome: str) -> None:
        self._frontend.metrics.requests.labels(outcome).inc()


def _format_of(job: Job, frontend: Frontend) -> Format:
    tokenizer, model = frontend.model.tokenizer, frontend.model.name
    if job.endpoint == "chat":
        return ChatFormat(job, tokenizer, Envelope.new("chatcmpl", model))
    if job.endpoint == "responses":
        return ResponsesFormat(job, tokenizer, Envelope.new("resp", model, "_"))
    return CompletionFormat(job, tokenizer, Envelope.new("cmpl", model))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
