import json
from pathlib import Path

import pytest

from benchmarks import transfer
from benchmarks.transfer import MESSAGES, PIECES, Extent
from benchmarks.transfer_report import table
from kv_transfer.transport import available

TINY = Extent(rounds=1, stream_bytes=1 << 20, pings=3, budget_s=60.0)
PIPES = ["memcpy", "raw TCP", "raw Unix", *(name for name in available() if name != "inproc")]


def test_every_pipe_is_measured_with_every_size_and_compared() -> None:
    report = transfer.run(TINY)
    assert [(row.pipe, row.size) for row in report.flows] == [
        (pipe, size) for pipe in PIPES for size in PIECES
    ]
    assert [(row.pipe, row.size) for row in report.delays] == [
        (pipe, size) for pipe in PIPES for size in MESSAGES
    ]
    assert all(row.gb_per_s > 0 and row.cpu_s_per_gib > 0 for row in report.flows)
    assert all(0 < row.p50_us <= row.p99_us for row in report.delays)
    ratios = [(row.pipe, row.ratios) for row in report.flows] + [
        (row.pipe, row.ratios) for row in report.delays
    ]
    assert all(list(given) == ["memcpy", "raw TCP", "raw Unix"] for _, given in ratios)
    assert all(given[pipe] == 1.0 for pipe, given in ratios if pipe in given)
    assert {row.transport for row in report.blocks} == set(PIPES[3:])
    text = table(report)
    assert all(f"\n{pipe} " in text for pipe in PIPES)


def test_figures_go_to_files_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer, "QUICK", TINY)
    figures, drawing = tmp_path / "figures.json", tmp_path / "drawing.png"
    options = ["--quick", "--only", "zmq+ipc", "--json", str(figures), "--plot", str(drawing)]
    assert transfer.main(options) == 0
    found = json.loads(figures.read_text())
    assert {row["pipe"] for row in found["flows"]} == {"memcpy", "raw TCP", "raw Unix", "zmq+ipc"}
    assert drawing.read_bytes().startswith(b"\x89PNG")
    assert "zmq+ipc" in capsys.readouterr().out


def test_an_unknown_transport_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert transfer.main(["--only", "zmq+tcp,carrier-pigeon"]) == 2
    assert "carrier-pigeon is none of zmq+tcp, zmq+ipc" in capsys.readouterr().err
