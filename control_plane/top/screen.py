"""One snapshot, as proxy/live.py describes it, drawn with rich."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Json = dict[str, Any]

STATES = {
    "ready": "green",
    "draining": "yellow",
    "silent": "bold red",
    "refused": "bold red",
    "lost": "bold red",
}
SEGMENTS = {
    "route": "bright_black", "retry": "red", "queue": "magenta", "prefill": "dark_orange", "transfer": "cyan",
    "wait": "yellow", "decode": "blue",
}  # fmt: skip
ROLES = {"prefill": "dark_orange", "decode": "blue"}
NUM_RECENT = 12
OTHER_COLUMNS = 56  # characters beside the waterfall


def draw(snapshot: Json, span: str, width: int) -> RenderableType:
    """``span``: which of the snapshot's windows, in seconds. ``width``: of the terminal, in characters."""
    return Group(
        _head(snapshot, span),
        _figures(snapshot["windows"][span], snapshot),
        _workers(snapshot["workers"]),
        _links(snapshot["links"]),
        _recent(snapshot["recent"], max(10, width - OTHER_COLUMNS)),
    )


def _head(snapshot: Json, span: str) -> Text:
    ready = (" ready ", "black on green") if snapshot["ready"] else (" not ready ", "white on red")
    more = f"  {snapshot['in_flight']} under way · figures of the last {span} s · Ctrl-C ends"
    return Text.assemble(("Baton ", "bold"), (f"{snapshot['model']}  ", "dim"), ready, (more, "dim"))


def _figures(window: Json, snapshot: Json) -> Columns:
    slo = snapshot["slo"]
    targets = [f"< {milliseconds(slo[name])}" if slo[name] else "any" for name in ("ttft_s", "itl_s")]
    tiles = (
        ("first token", milliseconds(window["ttft_p50_s"]), f"p99 {milliseconds(window['ttft_p99_s'])}"),
        ("between tokens", milliseconds(window["itl_p50_s"]), f"p99 {milliseconds(window['itl_p99_s'])}"),
        (
            "output",
            f"{rate(window['output_tokens_per_s'])} tok/s",
            f"prompts {rate(window['prompt_tokens_per_s'])}",
        ),
        ("requests", f"{rate(window['requests_per_s'])}/s", f"failed {rate(window['errors_per_s'])}"),
        ("goodput", f"{rate(window['good_per_s'])}/s", ", ".join(targets)),
    )
    panels = [
        Panel(Text.assemble((value, "bold"), f"\n{more}"), title=name, width=22)
        for name, value, more in tiles
    ]
    return Columns(panels)


def _workers(workers: Sequence[Json]) -> RenderableType:
    if not workers:
        return Text("no worker has announced itself yet", "yellow")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("worker", "state", "KV", "", "running", "waiting", "moving", "tokens/s", "CPU", "memory"):
        table.add_column(head, justify="left" if head in ("worker", "state", "") else "right")
    for worker in workers:
        table.add_row(*_worker(worker))
    return table


def _worker(worker: Json) -> list[RenderableType]:
    load, rates, is_prefill = worker["load"], worker["rates"], worker["role"] == "prefill"
    state = worker["state"] + (f": {worker['reason']}" if worker["reason"] else "")
    moving = f"{load['num_parked_blocks']} parked" if is_prefill else f"{load['num_receiving']} in"
    speed = rates["prompt_tokens" if is_prefill else "generation_tokens"]
    return [
        Text(worker["name"], ROLES[worker["role"]]),
        Text(state, STATES.get(worker["state"], "")),
        percent(worker["kv_use"]),
        Text("█" * round(10 * worker["kv_use"]), ROLES[worker["role"]]).append(
            "·" * round(10 * (1 - worker["kv_use"]))
        ),
        str(load["num_running"]),
        str(load["num_waiting"]),
        moving,
        rate(speed),
        percent(rates["cpu_seconds"]),
        size(worker["memory_bytes"]),
    ]


def _links(links: Sequence[Json]) -> Text:
    told = [f"{link['prefill']} → {link['decode']} {size(link['bytes_per_s'])}/s" for link in links]
    return Text("   ".join(told), "cyan")


def _recent(records: Sequence[Json], bar_width: int) -> Table:
    legend = Text("  ").join(Text(name, colour) for name, colour in SEGMENTS.items())
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=legend, title_justify="left", title_style="")
    for head in ("ago", "route", "tokens", "where its time went", "took"):
        table.add_column(head, justify="right" if head in ("ago", "took", "tokens") else "left", no_wrap=True)
    shown = records[:NUM_RECENT]
    longest = max((record["total_s"] for record in shown), default=0.0) or 1.0
    for record in shown:
        route = record["routes"][-1] if record["routes"] else {"prefill": None, "decode": "no worker"}
        pair = f"{route['prefill']} → {route['decode']}" if route["prefill"] else route["decode"]
        tokens = f"{record['prompt_tokens']} → {record['output_tokens']}"
        end = Text(record["error"], "bold red") if record["error"] else milliseconds(record["total_s"])
        table.add_row(
            f"{record['arrived_s_ago']:.0f} s",
            pair,
            tokens,
            waterfall(record["segments"], longest, bar_width),
            end,
        )
    return table


def waterfall(segments: Sequence[Json], longest: float, width: int) -> Text:
    """Every cell has the colour of the segment that its middle lies in."""
    bar, cell_s = Text(), longest / width
    for cell in range(width):
        at = (cell + 0.5) * cell_s
        names = [s["name"] for s in segments if s["start_s"] <= at < s["start_s"] + s["seconds"]]
        bar.append("█" if names else " ", SEGMENTS.get(names[0], "") if names else "")
    return bar


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "–"
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
