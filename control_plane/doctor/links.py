"""How fast bytes get from each prefill worker's core to each decode worker's, by each transport."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from control_plane.child import Command
from control_plane.doctor.findings import Finding

BUDGET_S = 60.0
GRACE_S = 60.0  # for the measurement that is under way then
SLOW_GB_PER_S = 0.3


def check(prefill: Sequence[Command], decode: Sequence[Command]) -> list[Finding]:
    """One finding for each pair of workers; on this machine only."""
    pairs = {(p.name, d.name): (p.cores[0], d.cores[-1]) for p in prefill for d in decode}
    if not pairs:
        return [Finding("note", "links", "no hand-over: every worker does both halves")]
    measured = measure(sorted(set(pairs.values())))
    if isinstance(measured, str):
        return [Finding("failure", "links", measured)]
    return [_finding(f"{p} → {d}", [m for m in measured if (m["from"], m["to"]) == cores])
            for (p, d), cores in pairs.items()]  # fmt: skip


def measure(cores: Sequence[tuple[int, int]]) -> list[dict[str, Any]] | str:
    """What ``benchmarks.pairs`` tells, or why it told nothing."""
    command = [sys.executable, "-m", "benchmarks.pairs", *(f"{here},{there}" for here, there in cores)]
    command += ["--budget-s", str(BUDGET_S)]
    limit_s = BUDGET_S + GRACE_S
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no figures within {limit_s:g} s"
    if done.returncode != 0:
        return (done.stderr.strip() or "the measurement failed").splitlines()[-1]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _finding(pair: str, measured: Sequence[dict[str, Any]]) -> Finding:
    if not measured:
        return Finding("note", "links", f"{pair}: not measured, there was no time left")
    told = [_told(one) for one in measured]
    fastest = max(float(one.get("gb_per_s", 0.0)) for one in measured)
    if fastest < SLOW_GB_PER_S:
        advice = "give each worker cores of its own, and look for other work on this machine"
        return Finding("warning", "links", f"{pair}: {', '.join(told)}", advice)
    return Finding("good", "links", f"{pair}: {', '.join(told)}")


def _told(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{one['transport']} does not work ({one['error']})"
    return f"{one['transport']} {one['gb_per_s']:.2f} GB/s, {one['p50_us']:.0f} µs"
