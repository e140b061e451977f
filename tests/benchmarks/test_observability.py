from benchmarks.observability import Beside, Row, meter_us, table, token_us
from tests.common.toy import make_sequence


def test_the_meter_is_timed_without_an_engine() -> None:
    assert meter_us([make_sequence(str(index), [1, 2, 3]) for index in range(4)]) > 0
    assert token_us() > 0


def test_the_table_tells_shares() -> None:
    text = table([Row(8, 20.0, 10.0, -3.0)], Beside(report_us=100.0, token_us=2.0))
    assert "| 8 | 20.0 | 10.0 | 0.050 % | -3 |" in text
    assert "0.020 % of a core" in text
