"""What a prefill worker says of a step under way."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.config import TransferConfig
from common.loop_thread import LoopThread
from common.scheduler import Work
from common.sequence import Sequence
from prefill_worker.worker import PrefillWorker
from tests.common.toy import NUM_LAYERS, make_engine, make_sequence, prompt


@pytest.fixture
async def transfers() -> AsyncIterator[LoopThread]:
    thread = LoopThread("transfers")
    yield thread
    thread.close()


def worker_of(transfers: LoopThread, **changes: Any) -> PrefillWorker:
    config = TransferConfig(**({"layer_groups": 2, "piece_bytes": 1024} | changes))
    return PrefillWorker(make_engine(), transfers, config, "p", "prefill-0")


def work_of(sequence: Sequence, num_tokens: int) -> Work:
    return Work(sequence, 0, num_tokens, num_tokens == len(sequence.token_ids))


async def test_a_long_prompt_to_be_handed_over_is_watched_part_by_part(transfers: LoopThread) -> None:
    watch = worker_of(transfers).watch([work_of(make_sequence("r", prompt(16), handoff=True), 16)])
    assert watch is not None and watch.every == NUM_LAYERS // 2
    watch.tell(1)  # of a transfer that was never offered: nobody minds


@pytest.mark.parametrize(
    ("sequence", "changes"),
    [
        (make_sequence("stays here", prompt(16)), {}),
        (make_sequence("a single token", prompt(16), handoff=True, max_tokens=1), {}),
        (make_sequence("short", prompt(4), handoff=True), {}),
        (make_sequence("whole blocks", prompt(16), handoff=True), {"layer_groups": 1}),
    ],
    ids=lambda value: "",
)
async def test_what_nobody_waits_for_is_not_watched(
    transfers: LoopThread, sequence: Sequence, changes: dict[str, int]
) -> None:
    assert worker_of(transfers, **changes).watch([work_of(sequence, len(sequence.token_ids))]) is None
