"""A server that runs: is it ready, are its workers well, how far is its clock from ours."""

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from control_plane.doctor.findings import Finding

TIMEOUT_S = 5.0
CLOCK_S = 2.0  # the header that tells the time tells whole seconds


def check(url: str, api_key: str) -> list[Finding]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, verify=False) as client:
            return [*_ready(client.get("/ready").json()), _clock(client), *_workers(client.get("/workers"))]
    except httpx.ConnectError:
        return [Finding("failure", "server", f"nothing answers at {url}", "start it with: baton serve")]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        return [Finding("failure", "server", f"{url} does not answer as a Baton does: {error!r}")]


def _ready(state: dict[str, Any]) -> Iterator[Finding]:
    counts = ", ".join(f"{count} {role}" for role, count in state["workers"].items())
    if not state["ready"]:
        advice = "look at the logs of the workers, and at --proxies"
        yield Finding(
            "failure", "server", f"not ready: no {' and no '.join(state['missing'])} worker", advice
        )
    elif state["missing"]:
        yield Finding(
            "warning", "server", f"ready with {counts}; no {' and no '.join(state['missing'])} worker"
        )
    else:
        yield Finding("good", "server", f"ready with {counts}")


def _clock(client: httpx.Client) -> Finding:
    sent = time.time()
    told = client.get("/version").headers.get("date", "")
    here = (sent + time.time()) / 2
    try:
        offset_s = parsedate_to_datetime(told).timestamp() + 0.5 - here
    except ValueError:
        return Finding("note", "clock", "the server does not tell the time")
    if abs(offset_s) < CLOCK_S:
        return Finding("good", "clock", f"within {CLOCK_S:g} s of this machine's")
    text = f"the server's is {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's"
    advice = "set clocks by NTP: deadlines do not need them, logs and traces of several machines do"
    return Finding("warning", "clock", text, advice)


def _workers(reply: httpx.Response) -> Iterator[Finding]:
    if reply.status_code == 401:
        yield Finding("failure", "workers", "the server wants a key", "--api-key, or BATON_API_KEY")
        return
    for worker in reply.raise_for_status().json()["workers"]:
        load, state = worker["load"], worker["state"]
        text = f"{worker['name']}: {state}, {load['num_running']} running, {load['num_waiting']} waiting"
        if state == "ready" and worker["trusted"]:
            yield Finding("good", "workers", text)
        elif state == "ready":
            yield Finding("warning", "workers", f"{text}; it has failed lately and gets little work")
        else:
            reason = f": {worker['reason']}" if worker["reason"] else ""
            yield Finding("warning" if state == "draining" else "failure", "workers", text + reason)
