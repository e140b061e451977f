"""What ``baton serve`` tells its user: what is being started, and how to use it once it serves."""

from collections.abc import Mapping

from control_plane.deployment import Deployment, control_address, http_url, own_url


def start_text(plan: Deployment) -> str:
    workers = " + ".join(f"{group.count} {group.role}" for group in plan.workers)
    several = len(plan.proxies) > 1
    proxies = f"{len(plan.proxies)} proxies" if several else "1 proxy"
    own = ", each by itself at " + ", ".join(own_url(plan, p) for p in plan.proxies) if several else ""
    return (
        f"baton: {plan.engine.model} on {proxies} + {workers}\n"
        f"  HTTP      {http_url(plan)}{own}\n"
        f"  control   {', '.join(map(control_address, plan.proxies))}"
    )


def ready_text(
    plan: Deployment, seconds: float, memory_bytes: Mapping[str, int], addresses: Mapping[str, str]
) -> str:
    """``memory_bytes`` (resident) and transfer ``addresses`` by name of process."""
    width = max(map(len, memory_bytes))
    processes = "\n".join(
        f"  {name.ljust(width)}  {size / 2**20:6.0f} MiB" + _listens(addresses.get(name, ""))
        for name, size in memory_bytes.items()
    )
    key = " -H 'Authorization: Bearer YOUR_KEY'" if plan.proxy.api_key else ""
    return (
        f"ready after {seconds:.1f} s\n{processes}\n\n"
        f"  curl {http_url(plan)}/v1/completions{key} -H 'Content-Type: application/json' \\\n"
        """    -d '{"model": "default", "prompt": "The capital of France is", "max_tokens": 16}'\n\n"""
        f"See what it does: {http_url(plan)}/ in a browser, or baton top\n"
        "Ctrl-C stops everything."
    )


def _listens(address: str) -> str:
    return f"  KV blocks at {address}" if address else ""
