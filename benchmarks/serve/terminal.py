"""What is seen in the terminal: progress while a run lasts, a table at the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.serve import generator
from benchmarks.serve.figures import Figures
from benchmarks.serve.results import Results


@contextmanager
def progress_of(label: str, total: int | None) -> Iterator[generator.Progress]:
    """Shown on standard error while it is a terminal."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} answered, {task.fields[more]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    if not console.is_terminal:
        yield lambda _: None
        return
    with progress:
        task = progress.add_task(label, total=total, more="")

        def show(run: generator.Run) -> None:
            ended = sum(outcome.ended_at > 0 for outcome in run.outcomes)
            failed = sum(bool(outcome.error) for outcome in run.outcomes)
            more = f"{len(run.outcomes) - ended} under way, {failed} failed, {run.num_lost} lost"
            progress.update(task, completed=ended, more=more)

        yield show


def table(results: Results) -> Table:
    """A row for each run; times in milliseconds."""
    found = Table(title=f"{results.label}: {results.about['requests']}", box=SIMPLE_HEAD, pad_edge=False)
    heads = ["load", "sent", "failed", *(f"{name}\np50 / p99 ms" for name in ("TTFT", "TPOT", "ITL", "E2E"))]
    heads += ["tokens/s", *(("in target", "goodput/s") if results.targets else ()), "late\np99 ms"]
    for head in heads:
        found.add_column(head, justify="left" if head == "load" else "right", no_wrap=True)
    for point in results.points:
        found.add_row(*_row(point.label, point.figures, bool(results.targets)))
    return found


def _row(label: str, figures: Figures, with_targets: bool) -> list[str]:
    row = [label, str(figures.num_sent), str(figures.num_failed)]
    row += map(_p50_p99, (figures.ttft_s, figures.tpot_s, figures.itl_s, figures.e2e_s))
    row.append(f"{figures.output_tokens_per_s:.1f}")
    if with_targets:
        row += [f"{figures.attainment:.1%}", f"{figures.goodput_per_s:.2f}"]
    late = figures.lateness_s
    return [*row, f"{1e3 * late['p99']:.1f}" if late else "–"]


def _p50_p99(found: dict[str, float]) -> str:
    return f"{1e3 * found['p50']:.1f} / {1e3 * found['p99']:.1f}" if found else "–"
