"""Pictures of one or several systems under the same loads, and a page with pictures and tables.

baton bench report A.json B.json --html report.html --png report.png
"""

import argparse
import base64
import importlib.util
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from benchmarks.serve.figures import bearable_rate
from benchmarks.serve.results import Point, Results, ResultsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROGRAM = "baton bench report"
SHARE = 0.9  # of requests in target, for the rate that a system bears
COLOURS = ("#2f6fde", "#e07b00", "#1f9d6b", "#b5439b", "#7a5cd6", "#8a8f98")
TEMPLATE = Path(__file__).with_name("report.html.j2")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Compare what `baton bench serve --json` wrote."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page with tables and pictures")
    parser.add_argument("--png", type=Path, metavar="FILE", help="the pictures")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if not (arguments.html or arguments.png):
        parser.error("say what to write: --html, --png or both")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("needs the package matplotlib")
    try:
        write([Results.read(path) for path in arguments.files], arguments.png, arguments.html)
    except ResultsError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return 0


def write(systems: Sequence[Results], png: Path | None, html: Path | None) -> None:
    if png is None and html is None:
        return
    drawn = picture(systems)
    if png is not None:
        png.write_bytes(drawn)
    if html is not None:
        html.write_text(page(systems, drawn), encoding="utf-8")


def picture(systems: Sequence[Results]) -> bytes:
    """A PNG of four panels against the load: attainment, TTFT, TPOT, throughput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    for system, colour in zip(systems, _colours(len(systems)), strict=True):
        _draw_throughput(panels[1][1], system, colour)
        _draw_percentiles(panels[0][1], system, colour, lambda point: point.figures.ttft_s)
        _draw_percentiles(panels[1][0], system, colour, lambda point: point.figures.tpot_s)
        _draw_attainment(panels[0][0], system, colour)
    titles = (
        "Requests in target, %",
        "TTFT, ms: p50, and p99 dashed",
        "TPOT, ms: p50, and p99 dashed",
        "Tokens/s",
    )
    for panel, title in zip(panels.flat, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel(systems[0].unit)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False, loc="lower left")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    return drawn.getvalue()


def page(systems: Sequence[Results], drawn: bytes) -> str:
    """One file: pictures are inside."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["ms"] = lambda seconds: "–" if seconds is None else f"{1e3 * seconds:,.1f}"
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        systems=[
            (system, colour, bearable(system))
            for system, colour in zip(systems, _colours(len(systems)), strict=True)
        ],
        picture=base64.b64encode(drawn).decode(),
        share=SHARE,
    )


def bearable(system: Results) -> float | None:
    """The load that the system bears with ``SHARE`` of requests in target; None where no target was set."""
    if not system.targets:
        return None
    return bearable_rate([(point.amount, point.figures.attainment) for point in _ordered(system)], SHARE)


def _ordered(system: Results) -> list[Point]:
    return sorted(system.points, key=lambda point: point.amount)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _draw_attainment(panel: "Axes", system: Results, colour: str) -> None:
    points = _ordered(system)
    shares = [100 * point.figures.attainment for point in points]
    panel.plot([point.amount for point in points], shares, "o-", color=colour, label=system.label)
    panel.axhline(100 * SHARE, color="0.6", linestyle=":", linewidth=1)


def _draw_percentiles(
    panel: "Axes", system: Results, colour: str, read: Callable[[Point], dict[str, Any]]
) -> None:
    for name, style in (("p50", "o-"), ("p99", "o--")):
        points = [(point.amount, 1e3 * read(point)[name]) for point in _ordered(system) if read(point)]
        panel.plot(
            [amount for amount, _ in points], [ms for _, ms in points], style, color=colour, markersize=4
        )


def _draw_throughput(panel: "Axes", system: Results, colour: str) -> None:
    points = _ordered(system)
    rates = [point.figures.output_tokens_per_s for point in points]
    panel.plot([point.amount for point in points], rates, "o-", color=colour)


if __name__ == "__main__":
    sys.exit(main())
