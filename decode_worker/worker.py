"""The life of a decode worker: takes blocks, gives tokens.

Sequences come in two ways: handed over by a prefill worker, their prompt's blocks landed in the cache, or as
a Generate from a proxy, prompt and all (no prefill worker at hand, or not worth one). From there on they are
the same.

Three threads meet in this class: the engine's calls ``on_step``, the receiver lives in the transfer loop,
everything else in the main loop. They pass messages by ``call_soon_threadsafe`` and share nothing but the
engine, which locks itself."""

import asyncio

from common.config import TransferConfig
from common.engine import Engine, Reservation
from common.loop_thread import LoopThread
from common.messages import Generate, Handover, Refusal, Status, Tokens, WorkerError
from common.outputs import status_of, tokens_of, usage_of
from common.sequence import Sequence, SequenceKey, StepOutput
from common.service import Service
from common.tracing import Tracer
from kv_transfer.receiver import Receiver


class DecodeWorker:
    def __init__(
        self,
        engine: Engine,
        transfers: LoopThread,
        config: TransferConfig,
        incarnation: str,
        name: str,
        tracer: Tracer | None = None,
    ) -> None:
        self._engine = engine
        self._transfers = transfers
        self._incarnation = incarnation
        self._name = name
        self._tracer = tracer
        self._usage = usage_of(engine)
        self._loop = asyncio.get_running_loop()
        self.receiver = Receiver(
            engine, config, incarnation, engine.layout, engine.cache.block_bytes, self._adopt
        )
        self.address = ""  # of the transfer listener
        self.service: Service | None = None

    # Main loop

    def status(self, draining: bool) -> Status:
        return status_of(
            self._engine,
            self._incarnation,
            self._name,
            "decode",
            self.address,
            draining,
            self._counters(),
            self.receiver.counters.histograms(),
            self._usage,
        )

    def generate(self, message: Generate) -> None:
        if message.decode is not None:
            raise Refusal("invalid", "a decode worker does not hand over to another")
        self._engine.add(Sequence.from_generate(message, handoff=False))

    def abort(self, key: SequenceKey, reason: str) -> None:
        self._transfers.call(self._abort, key, reason)

    def drain(self) -> None:
        self.receiver.draining = True

    def idle(self) -> bool:
        if self.receiver.num_open:
            return False
        load = self._engine.load()  # asked second: a sequence is here before its transfer has ended
        return load.num_running + load.num_waiting == 0

    def _publish(self, outputs: list[Tokens]) -> None:
        assert self.service is not None
        self.service.publish(outputs)

    # Engine thread

    def on_step(self, outputs: list[StepOutput]) -> None:
        self._loop.call_soon_threadsafe(
            self._publish, [tokens_of(o) for o in outputs if o.token_ids or o.finish_reason]
        )
        ended = [output for output in outputs if output.finish_reason is not None]
        if ended:
            self._transfers.call(self.receiver.admit_waiting)
        if self._tracer is not None:
            for output in ended:
                self._tracer.note(output.sequence, self._name, output.finish_reason or "")

    # Transfer loop

    def _abort(self, key: SequenceKey, reason: str) -> None:
        """Here, not in the main loop: a sequence is always either in the receiver or in the engine as this
        loop sees it, so an abort cannot slip through between the two."""
        if not self.receiver.abort(key, reason):
            self._engine.abort(key, reason)

    def _adopt(self, reservation: Reservation, handover: Handover) -> None:
        """The blocks have landed: continue the sequence from the tokens that the prefill worker sampled. The
        proxy is told those once more, so that it has no gap should the first telling be lost with its
        sender."""
        generate = handover.generate
        sequence = Sequence.from_generate(generate, handoff=False)
        first = Tokens(
            request_id=generate.request_id,
            attempt=generate.attempt,
            start=sequence.num_output_tokens,
            token_ids=handover.token_ids,
            logprobs=handover.logprobs,
            num_cached_tokens=handover.num_cached_tokens,
            timings=handover.timings,
        )
        sequence.num_cached_tokens = handover.num_cached_tokens
        sequence.token_ids.extend(handover.token_ids)
        self._loop.call_soon_threadsafe(self._own, sequence, generate.proxy, first)
        try:
            self._engine.adopt(reservation, sequence)
        except Refusal as refusal:
            # By now the proxy believes that the request is here: its end must be told from here, too.
            self._engine.cancel(reservation)
            self.receiver.admit_waiting()
            self._loop.call_soon_threadsafe(self._fail_adopted, sequence.key, refusal.error)

    # Main loop again

    def _own(self, sequence: Sequence, proxy: str, first: Tokens) -> None:
        assert self.service is not None
        try:
            self.service.adopt(sequence.key, proxy)
        except Refusal as refusal:
            self.abort(sequence.key, refusal.error.message)
        else:
            self.service.publish([first])

    def _fail_adopted(self, key: SequenceKey, error: WorkerError) -> None:
        """What is wrong with a request that was handed over is not its client's fault."""
        assert self.service is not None
        code = "internal" if error.code == "invalid" else error.code
        self.service.fail(key, WorkerError(code, error.message))

    def _counters(self) -> dict[str, float]:
        counters = self.receiver.counters
        by_cause = {
            f"{name}:{cause}": float(number)
            for name, counter in (
                ("transfers_refused_total", counters.num_refused),
                ("transfers_abandoned_total", counters.num_failed),
                ("transfer_messages_fenced_total", counters.num_fenced),
            )
            for cause, number in dict(counter).items()
        }
        return by_cause | {
            "transfers_received_total": counters.num_landed,
            "transfer_received_bytes_total": counters.received_bytes,
        }
