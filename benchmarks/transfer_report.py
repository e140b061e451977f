"""What the transfer benchmark found, as text, as JSON and as a drawing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.blocks import BlockRow


class FlowRow(NamedTuple):
    """A stream of pieces. ``ratios`` are throughputs relative to other pipes' in the same rounds."""

    pipe: str
    size: int  # bytes of a piece
    gb_per_s: float
    cpu_s_per_gib: float  # both sides
    ratios: dict[str, float]


class DelayRow(NamedTuple):
    """One way, as half of a round trip. ``ratios`` are of the medians."""

    pipe: str
    size: int  # bytes of a message
    p50_us: float
    p99_us: float
    ratios: dict[str, float]


@dataclass(slots=True)
class Report:
    machine: dict[str, str]
    rounds: int
    bases: list[str]  # the pipes that the others are compared with
    flows: list[FlowRow]
    delays: list[DelayRow]
    blocks: list[BlockRow]


def as_json(report: Report) -> dict[str, object]:
    return {
        "machine": report.machine,
        "rounds": report.rounds,
        "flows": [row._asdict() for row in report.flows],
        "delays": [row._asdict() for row in report.delays],
        "blocks": [{**row._asdict(), "ratio": row.ratio} for row in report.blocks],
    }


def table(report: Report) -> str:
    flows, delays = report.flows, report.delays
    own_flows = [row for row in flows if row.pipe not in report.bases]
    own_delays = [row for row in delays if row.pipe not in report.bases]
    lines = [", ".join(f"{name} {text}" for name, text in report.machine.items())]
    lines.append(f"medians of {report.rounds} rounds")
    lines += section("GB/s, by size of piece", ((row, f"{row.gb_per_s:.2f}") for row in flows))
    lines += section("CPU s per GiB, both sides", ((row, f"{row.cpu_s_per_gib:.2f}") for row in flows))
    for base in report.bases:
        lines += section(f"GB/s relative to {base}", ((row, f"{row.ratios[base]:.2f}") for row in own_flows))
    lines += section(
        "one way p50 / p99 in µs, by size of message",
        ((row, f"{row.p50_us:.0f} / {row.p99_us:.0f}") for row in delays),
    )
    for base in report.bases:
        lines += section(f"p50 relative to {base}", ((row, f"{row.ratios[base]:.1f}") for row in own_delays))
    return "\n".join(lines + block_lines(report.blocks))


def section(title: str, cells: Iterable[tuple[FlowRow | DelayRow, str]]) -> list[str]:
    """A heading with the sizes, and a line for each pipe."""
    by_pipe: dict[str, dict[int, str]] = {}
    for row, text in cells:
        by_pipe.setdefault(row.pipe, {})[row.size] = text
    sizes = list(next(iter(by_pipe.values()), {}))
    lines = ["", title, " " * 10 + "".join(f"{size_name(size):>14}" for size in sizes)]
    for pipe, texts in by_pipe.items():
        lines.append(f"{pipe:10}" + "".join(f"{texts[size]:>14}" for size in sizes))
    return lines


def block_lines(rows: Sequence[BlockRow]) -> list[str]:
    if not rows:
        return []
    lines = ["", "blocks through sender and receiver, from offer to landed"]
    lines.append(f"{'':10}{'tokens':>14}{'ms':>14}{'GB/s':>14}{'bare GB/s':>14}{'ratio':>14}")
    for row in rows:
        figures = (
            f"{row.milliseconds:>14.1f}{row.gb_per_s:>14.2f}{row.bare_gb_per_s:>14.2f}{row.ratio:>14.2f}"
        )
        lines.append(f"{row.transport:10}{row.num_tokens:>14}{figures}")
    return lines


def size_name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


COLOURS = {
    "memcpy": "#bdbdbd",
    "raw TCP": "#969696",
    "raw Unix": "#636363",
    "zmq+tcp": "#3b6fb6",
    "zmq+ipc": "#2f9e8f",
    "ucx": "#d1605e",
}


def plot(report: Report, file: Path) -> None:
    """Three panels side by side. Raises ``ImportError`` without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), layout="constrained")
    rate, cpu, delay = figure.subplots(1, 3)
    draw(rate, report, [(row, row.gb_per_s) for row in report.flows])
    rate.set(title="Throughput", xlabel="piece", ylabel="GB/s", ylim=(0, None))
    draw(cpu, report, [(row, row.cpu_s_per_gib) for row in report.flows])
    cpu.set(title="Processor time, both sides", xlabel="piece", ylabel="s per GiB", ylim=(0, None))
    draw(delay, report, [(row, row.p50_us) for row in report.delays])
    for row in report.delays:
        beside = row.size * (1 + 0.08 * list(COLOURS).index(row.pipe))
        delay.plot([beside] * 2, [row.p50_us, row.p99_us], color=COLOURS[row.pipe], linewidth=2, alpha=0.45)
    delay.set(title="One way: median, and up to p99", xlabel="message", ylabel="µs", yscale="log")
    handles, labels = rate.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("Between two processes on cores of their own", fontsize=13)
    figure.savefig(file, dpi=150)


def draw(axes: Any, report: Report, points: Sequence[tuple[FlowRow | DelayRow, float]]) -> None:
    for pipe in dict.fromkeys(row.pipe for row, _ in points):
        sizes = [row.size for row, _ in points if row.pipe == pipe]
        values = [value for row, value in points if row.pipe == pipe]
        style = "--" if pipe in report.bases else "-"
        width = 1.4 if pipe in report.bases else 2.4
        axes.plot(
            sizes, values, style, color=COLOURS[pipe], linewidth=width, marker="o", markersize=4, label=pipe
        )
    ticks = sorted({row.size for row, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size_name(size) for size in ticks], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
