"""``baton serve``: a whole system on this machine, from one command.

1  read       options from command line, environment and cluster file
2  check      the model is there and fits into memory, ports are free; what cannot work is said in one line
3  run        the supervisor starts the processes, says when they serve, and keeps them until told to stop
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from common import model_source
from common.config import ConfigError, ProxyConfig
from common.model_config import ModelConfig, ModelError
from common.notice import tell_ready
from common.options import refusal
from control_plane import deployment, gpus, memory, ports
from control_plane.commands import commands
from control_plane.deployment import Deployment, own_url
from control_plane.forking import nurseries
from control_plane.greeting import ready_text, start_text
from control_plane.notices import Notices
from control_plane.readiness import wait_ready
from control_plane.supervisor import Limits, Outcome, Supervisor
from control_plane.terminal import Terminal

PROGRAM = "baton serve"
_KILL_GRACE_S = 5.0  # beyond a process's own time to drain


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 when stopped by a signal, 2 when it cannot work as asked, 1 when it failed."""
    try:
        plan = deployment.read(argv, os.environ, gpus.count(os.environ))
        plan.proxy.all_keys()  # says now what is wrong with the file of keys
        check_model(plan)
        ports.require_free(plan.proxy.host, plan.proxy.port, "port")
        with contextlib.ExitStack() as claims:
            return run(replace(plan, proxies=with_ports(plan, claims)))
    except (ConfigError, ModelError) as error:
        return refusal(PROGRAM, error)


def check_model(plan: Deployment) -> None:
    """Fetches the models if need be, so that the processes find them; ConfigError or ModelError."""
    for model in sorted({engine.model for engine in (plan.engine, *plan.engines)}):
        config = ModelConfig.load(model_source.resolve(model).directory)
        engines = [engine for engine in plan.engines if engine.model == model]
        memory.require_enough(model, config, engines, memory.available_bytes(), plan.num_gpus)


def with_ports(plan: Deployment, claims: contextlib.ExitStack) -> tuple[ProxyConfig, ...]:
    """The proxies with ports that are free, and no other ``baton serve``'s while ``claims`` is open."""

    def claim(host: str, port: int, fixed: bool, option: str) -> int:
        found = ports.claim(host, port, fixed, option)
        claims.enter_context(found.claim)
        return found.port

    given = plan.control_port_given
    control = [claim(p.control_host, p.control_port, given, "control-port") for p in plan.proxies]
    proxies = [replace(p, control_port=port) for p, port in zip(plan.proxies, control, strict=True)]
    if len(proxies) == 1:
        return (replace(proxies[0], port=plan.proxy.port or claim(plan.proxy.host, 0, True, "port")),)
    own = tuple(claim(p.host, p.own_port, p.own_port > 0, "own-port") for p in proxies)
    return tuple(replace(p, own_port=port, sibling_ports=own) for p, port in zip(proxies, own, strict=True))


def run(plan: Deployment) -> int:
    notices = Notices()
    processes = commands(plan, os.environ | notices.environment)
    forking = nurseries(processes)
    terminal = Terminal.standard([process.name for process in processes] + [each.name for each in forking])
    drain_s = max(stop.drain_timeout_s for stop in (plan.stop, *(group.stop for group in plan.workers)))
    limits = Limits(start_timeout_s=plan.serve.start_timeout_s, stop_timeout_s=drain_s + _KILL_GRACE_S)
    started = time.monotonic()

    async def ready() -> str:
        keys = plan.proxy.all_keys()
        urls = [own_url(plan, proxy) for proxy in plan.proxies]
        roles = {group.role: group.count for group in plan.workers}
        addresses = await wait_ready(urls, keys[0] if keys else "", roles)
        nurseries_too = {each.name: each.child for each in forking if each.child is not None}
        memory_bytes = {
            name: memory.resident_bytes(child.pid)
            for name, child in (supervisor.children | nurseries_too).items()
        }
        tell_ready()
        return ready_text(plan, time.monotonic() - started, memory_bytes, addresses)

    supervisor = Supervisor(processes, ready, terminal, limits, forking, notices)
    terminal.say(start_text(plan))
    return _close(asyncio.run(supervisor.run()), terminal)


def _close(outcome: Outcome, terminal: Terminal) -> int:
    if outcome.reason:
        print(f"{PROGRAM}: error: {outcome.reason}", file=sys.stderr, flush=True)
    else:
        terminal.say("stopped")
    return outcome.exit_code
