import logging

import pytest

from common.usage import Usage


def test_a_process_tells_its_cpu_time_and_memory() -> None:
    usage = Usage()
    assert usage.counters()["process_cpu_seconds_total"] > 0
    assert usage.gauges().keys() == {"process_resident_memory_bytes"}
    assert usage.gauges()["process_resident_memory_bytes"] > 1 << 20


def test_a_gpu_that_cannot_be_asked_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        usage = Usage("00000000-0000-0000-0000-000000000000")
        first, second = usage.gauges(), usage.gauges()
    assert usage.seat == "" != Usage().seat
    assert first.keys() == second.keys() == {"process_resident_memory_bytes"}
    assert [record.message.split(":")[0] for record in caplog.records] == ["no metrics of the GPU"]
