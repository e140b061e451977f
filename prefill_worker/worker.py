"""The life of a prefill worker: takes prompts, gives blocks.

A request with a decode worker named in it is offered to that worker when its prompt has got its blocks here,
before the first step of it. Not earlier: a decode worker full of places for prompts that wait here for parked
ones to leave, which wait for a place there, would be a deadlock. The sender hears of finished
blocks after every step, and during it of every few layers, the proxy gets the first token, and what the
decode worker has taken over is freed. A request without one is served to its end here.

Three threads meet in this class: the engine's calls ``on_step``, the sender lives in the transfer loop,
everything else in the main loop. They pass messages by ``call_soon_threadsafe`` and share nothing but the
engine, which locks itself."""

import asyncio

from common.config import TransferConfig
from common.engine import Engine
from common.loop_thread import LoopThread
from common.messages import Generate, Refusal, Status, Tokens
from common.outputs import status_of, tokens_of, usage_of
from common.scheduler import Work
from common.secret import Secret
from common.sequence import Sequence, SequenceKey, StepOutput
from common.service import Service
from common.timings import timings_of
from common.tracing import Tracer
from kernels import Watch
from kv_transfer.sender import Outcome, Sender


class PrefillWorker:
    def __init__(
        self,
        engine: Engine,
        transfers: LoopThread,
        config: TransferConfig,
        incarnation: str,
        name: str,
        tracer: Tracer | None = None,
        secret: Secret | None = None,
    ) -> None:
        self._engine = engine
        self._transfers = transfers
        self._incarnation = incarnation
        self._name = name
        self._tracer = tracer
        self._usage = usage_of(engine)
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(
            engine,
            config,
            incarnation,
            engine.layout,
            engine.cache.block_bytes,
            self._transfer_ended,
            secret,
        )
        self._config = config
        self._unoffered: dict[SequenceKey, Generate] = {}
        self.service: Service | None = None

    # Main loop

    def status(self, draining: bool) -> Status:
        return status_of(
            self._engine,
            self._incarnation,
            self._name,
            "prefill",
            "",
            draining,
            self._counters(),
            self._sender.counters.histograms(),
            self._usage,
            dict(self._sender.counters.bytes_per_s),
        )

    def generate(self, message: Generate) -> None:
        sequence = Sequence.from_generate(message, handoff=message.decode is not None)
        if message.decode is not None:
            self._unoffered[sequence.key] = message
        try:
            self._engine.add(sequence)
        except Refusal:
            self._unoffered.pop(sequence.key, None)
            raise

    def abort(self, key: SequenceKey, reason: str) -> None:
        self._engine.abort(key, reason)

    def drain(self) -> None:
        pass  # no new Generate comes; what is under way is handed over or finished

    def idle(self) -> bool:
        return self._sender.num_open == 0

    # Engine thread

    def on_step(self, outputs: list[StepOutput]) -> None:
        self._loop.call_soon_threadsafe(
            self._publish, [tokens_of(o) for o in outputs if o.token_ids or o.finish_reason]
        )
        for output in outputs:
            if output.sequence.handoff:
                self._pass_on(output)
            if output.finish_reason is not None and self._tracer is not None:
                self._tracer.note(output.sequence, self._name, output.finish_reason)

    def watch(self, works: list[Work]) -> Watch | None:
        """How the sender hears of layers while a step computes them: often enough for pieces of the usual
        size. Nothing is told of a step that would make a single such piece: sending takes time from
        computing, and its first token would wait for what its second gains."""
        leaving = [work for work in works if _may_leave(work)]
        cache, num_layers = self._engine.cache, self._engine.layout.num_layers
        if not leaving or cache.device.type != "cpu":
            return None
        num_tokens = sum(work.num_tokens for work in leaving)
        tokens_bytes = num_tokens * cache.layer_bytes // self._engine.layout.block_size
        every = max(-(-num_layers // self._config.layer_groups), -(-self._config.piece_bytes // tokens_bytes))
        if every > num_layers // 2:
            return None

        ends = [(work.sequence.key, work.start + work.num_tokens) for work in leaving]

        def tell(num_layers: int) -> None:
            for key, num_computed in ends:
                self._transfers.call(self._sender.progress, key, num_computed, num_layers)

        return Watch(every, tell)

    def _pass_on(self, output: StepOutput) -> None:
        key = output.sequence.key
        message = self._unoffered.pop(key, None)
        if message is not None and output.finish_reason is None:
            self._transfers.call(self._sender.offer, message, output.sequence)
        if output.finish_reason is not None:
            self._transfers.call(self._sender.cancel, key, output.finish_reason)
        elif output.token_ids:
            timings = timings_of(output.sequence)
            self._transfers.call(self._sender.hand_over, key, output.token_ids, output.logprobs, timings)
        else:
            self._transfers.call(self._sender.progress, key, output.sequence.num_computed)

    # Transfer loop

    async def close(self) -> None:
        await self._sender.close()

    def _transfer_ended(self, outcome: Outcome) -> None:
        self._loop.call_soon_threadsafe(self._hand_over_ended, outcome)

    # Main loop again

    def _publish(self, outputs: list[Tokens]) -> None:
        assert self.service is not None
        self.service.publish(outputs)

    def _hand_over_ended(self, outcome: Outcome) -> None:
        assert self.service is not None
        key, error, exposed_s = outcome.key, outcome.error, outcome.exposed_s
        if error is not None:
            self.service.fail(key, error)
            self._engine.abort(key, error.message)
            return
        timings = {"exposed_transfer_s": exposed_s}
        self.service.publish([Tokens(key.request_id, key.attempt, 0, timings=timings)])
        self.service.forget(key)
        if self._engine.release(key) and self._tracer is not None:
            self._tracer.note(outcome.sequence, self._name, "handed over")

    def _counters(self) -> dict[str, float]:
        counters = self._sender.counters
        failed = {f"transfers_failed_total:{code}": float(n) for code, n in dict(counters.num_failed).items()}
        by_peer = {f"transfer_link_bytes_total:{peer}": n for peer, n in dict(counters.link_bytes).items()}
        return (
            failed
            | by_peer
            | {
                "transfers_sent_total": counters.num_landed,
                "transfers_cancelled_total": counters.num_cancelled,
                "transfer_sent_bytes_total": counters.sent_bytes,
                "transfer_sent_blocks_total": counters.sent_blocks,
                "transfer_skipped_blocks_total": counters.skipped_blocks,
            }
        )


def _may_leave(work: Work) -> bool:
    """Whether the blocks will be wanted elsewhere: the first token may be known to be the last."""
    sequence = work.sequence
    return sequence.handoff and sequence.sampling.max_tokens > sequence.num_output_tokens + 1
