"""Figures of all proxies that share a port, told by whichever of them is asked.

Each answers on a port of its own, too, where /metrics is about it alone. On the shared port the one that is
asked asks the others there, and tells all with a label ``proxy``: a sibling that is down has no figures, and
``baton_proxy_up`` is 0. What workers report of themselves, every proxy knows: it is told once.
"""

import asyncio
from collections.abc import Sequence

from common.config import ProxyConfig
from common.hosts import reachable

TIMEOUT_S = 2.0  # for a sibling that stands still
UP = "baton_proxy_up"

Families = dict[str, list[str]]  # lines by the name of the metric: two that describe it, and its samples


async def metrics_of_all(own: str, config: ProxyConfig) -> str:
    """``own``: what this process tells of itself."""
    import httpx  # many megabytes, for those alone that have siblings

    scheme = "https" if config.ssl_certfile else "http"
    base = f"{scheme}://{reachable(config.host)}"

    # The certificate is made for the name that clients use, and this asks a process of our own machine.
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=False) as client:

        async def ask(port: int) -> str | None:
            if port == config.own_port:
                return own
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    reply = await client.get(f"{base}:{port}/metrics")
            except (httpx.HTTPError, TimeoutError):
                return None
            return reply.text if reply.status_code == 200 else None

        texts = await asyncio.gather(*map(ask, config.sibling_ports))
    return merged(texts, config.sibling_ports.index(config.own_port))


def merged(texts: Sequence[str | None], own: int) -> str:
    """Expositions of several proxies as one; None for one that is down. ``own`` is the index of the one that
    speaks of workers."""
    families: Families = {UP: [f"# HELP {UP} Whether the proxy answers", f"# TYPE {UP} gauge"]}
    for index, text in enumerate(texts):
        families[UP].append(f'{UP}{{proxy="{index}"}} {float(text is not None)}')
        for name, lines in _families(text or "").items():
            head = [line for line in lines if line.startswith("#")]
            samples = (_labelled(line, index, own) for line in lines[len(head) :])
            families.setdefault(name, head).extend(sample for sample in samples if sample)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _families(text: str) -> Families:
    found: Families = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            lines = found.setdefault(line.split(" ", 3)[2], [])
        lines.append(line)
    return found


def _labelled(sample: str, index: int, own: int) -> str:
    """Empty where another one tells it."""
    name, _, rest = sample.partition(" ")
    if "{" not in name:
        return f'{name}{{proxy="{index}"}} {rest}'
    name, _, rest = sample.partition("{")
    if rest.startswith('worker="') or ',worker="' in rest:
        return sample if index == own else ""
    return f'{name}{{proxy="{index}",{rest}'
