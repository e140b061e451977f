"""The command line, and how findings are shown."""

import argparse
import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from common.config import ConfigError
from control_plane import deployment, gpus
from control_plane.commands import commands
from control_plane.doctor import links, machine, plan, server
from control_plane.doctor.findings import Finding, Level

MARKS: dict[Level, tuple[str, str]] = {
    "good": ("✓", "green"),
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "failure": ("✗", "bold red"),
}


def main(argv: Sequence[str]) -> int:
    """Exit code: 1 when something will not work, 0 otherwise, warnings or not."""
    parser = argparse.ArgumentParser(
        prog="baton doctor",
        description="Check what baton serve would start with the same options, on this machine.",
        epilog="All options of baton serve are taken: see baton serve --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--server", metavar="URL", help="check a server that runs instead")
    parser.add_argument("--no-measure", action="store_true", help="do not measure how fast transports are")
    own, others = parser.parse_known_args(argv)
    if own.server:
        key = _api_key(others)
        return show(server.check(own.server.rstrip("/"), key))
    return show([*machine.check(), *planned(others, measured=not own.no_measure)])


def show(findings: Iterable[Finding]) -> int:
    console, worst = Console(highlight=False), 0
    found = list(findings)
    width = max(len(finding.subject) for finding in found)
    for level, subject, text, advice in found:
        mark, style = MARKS[level]
        console.print(Text.assemble((mark, style), f" {subject:{width}}  ", text), soft_wrap=True)
        if advice:
            console.print(Text(f"  {'':{width}}  → {advice}", "italic"), soft_wrap=True)
        worst = max(worst, level == "failure")
    num_warnings = sum(finding.level == "warning" for finding in found)
    num_failures = sum(finding.level == "failure" for finding in found)
    console.print(f"\n{num_failures} will not work, {num_warnings} will work badly")
    return int(worst)


def planned(argv: Sequence[str], measured: bool) -> list[Finding]:
    """About what `baton serve` would start with the options ``argv``."""
    try:
        deployed = deployment.read(argv, os.environ, gpus.count(os.environ))
        processes = commands(deployed, os.environ)
    except ConfigError as error:
        return [Finding("failure", "options", str(error), "see docs/configuration.md")]
    found = plan.check(deployed, processes)
    if measured:
        roles = [group.role for group in deployed.workers for _ in range(group.count)]
        workers = list(zip(processes[len(deployed.proxies) :], roles, strict=True))
        sides = [[w for w, role in workers if role == side] for side in ("prefill", "decode")]
        found += links.check(*sides)
    return found


def _api_key(argv: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(prog="baton doctor --server", allow_abbrev=False)
    parser.add_argument("--api-key", default=os.environ.get("BATON_API_KEY", "").split(",")[0])
    return str(parser.parse_args(argv).api_key)
