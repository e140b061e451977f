"""What a whole system tells about itself: one is started with everything on."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from common.metrics import PROCESS_METRICS, RECEIVER_METRICS, SENDER_METRICS, WORKER_METRICS, Metric
from tests.system.server import START_TIMEOUT_S, Server, serving

ARRIVAL_S = 60.0
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PROMPT = "The capital of France is a city that many people visit, and its name is"


@dataclass(slots=True)
class Receiver:
    """Takes in spans as a collector does."""

    url: str = ""
    spans: list[tuple[str, Any]] = field(default_factory=list)  # with the service that sent them
    grown: threading.Condition = field(default_factory=threading.Condition)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        sent = ExportTraceServiceRequest.FromString(body)
        with self.grown:
            for group in sent.resource_spans:
                named = {a.key: a.value.string_value for a in group.resource.attributes}
                for scope in group.scope_spans:
                    self.spans += [(named["service.name"], span) for span in scope.spans]
            self.grown.notify_all()

    def of_trace(self, trace_id: str, count: int) -> dict[str, Any]:
        """Its spans by service, once there are so many."""

        def found() -> dict[str, Any]:
            return {name: span for name, span in self.spans if span.trace_id.hex() == trace_id}

        with self.grown:
            assert self.grown.wait_for(lambda: len(found()) >= count, ARRIVAL_S), self.spans
            return found()


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@dataclass(slots=True)
class Observed:
    server: Server
    receiver: Receiver
    metrics_port: int

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}{path}", timeout=START_TIMEOUT_S, trust_env=False)

    def post(self, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "timings": True, "ignore_eos": True}
        url = f"{self.server.url}/v1/completions"
        reply = httpx.post(url, json=body | fields, headers=headers, timeout=START_TIMEOUT_S, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply

    def metrics_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Workers report now and then: the proxy's metrics, once they fulfil it."""
        deadline = time.monotonic() + ARRIVAL_S
        while not condition(families := families_of(self.get("/metrics").text)):
            assert time.monotonic() < deadline, sorted(families)
            time.sleep(0.1)
        return families


def two_free_ports() -> int:
    """The first of two that follow each other, outside the range that the system gives to connections."""
    for _ in range(1000):
        port = random.randrange(20000, 30000)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two free ports")


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    port = two_free_ports()
    with (
        receiving() as receiver,
        serving(
            "--otlp-endpoint", receiver.url, "--metrics-port", str(port), "--disaggregate", "always"
        ) as server,
    ):
        yield Observed(server, receiver, port)


def families_of(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_one_trace_goes_over_proxy_and_both_workers(observed: Observed) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    reply = observed.post(headers)
    assert reply.headers["traceparent"].split("-")[1] == TRACE_ID
    spans = observed.receiver.of_trace(TRACE_ID, 3)
    request, prefill, decode = (spans[f"baton-{name}"] for name in ("proxy", "prefill", "decode"))
    assert (request.name, prefill.name, decode.name) == ("request", "prefill", "decode")
    assert request.parent_span_id.hex() == "b7ad6b7169203331"
    assert request.span_id.hex() == reply.headers["traceparent"].split("-")[2]
    assert prefill.parent_span_id == decode.parent_span_id == request.span_id
    events = {span.name: [event.name for event in span.events] for span in (request, prefill, decode)}
    assert set(events["request"]) == {"dispatched", "first_token", "handed_over"}
    assert set(events["prefill"]) == {"queued", "scheduled", "first_token", "landed", "finished"}
    assert set(events["decode"]) == {"adopted", "scheduled", "first_token", "finished"}
    for span in (request, prefill, decode):
        times = [event.time_unix_nano for event in span.events]
        assert all(earlier <= later for earlier, later in pairwise(times))
        assert span.start_time_unix_nano < span.end_time_unix_nano
    told = {attribute.key for attribute in request.attributes}
    assert {"baton.kernel_s", "baton.path", "gen_ai.usage.output_tokens"} <= told


def test_the_parts_of_a_requests_time_add_up(observed: Observed) -> None:
    told = observed.post().json()["choices"][0]["timings"]
    parts = [told[name] for name in ("kernel_s", "scheduling_s", "transfer_s", "cache_s")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(told["total_s"], rel=0.02)
    assert told["kernel_s"] == pytest.approx(told["prefill_kernel_s"] + told["decode_kernel_s"])
    assert 0 < told["prefill_kernel_s"] <= told["prefill_s"]
    assert 0 < told["decode_kernel_s"] <= told["first_step_s"] + told["decode_s"]


def test_the_slowest_requests_tell_their_route(observed: Observed) -> None:
    observed.post()
    slowest = observed.get("/debug/requests").json()["slowest"]
    record = next(r for r in slowest if r["routes"][0]["path"] == "disaggregated")
    assert record["routes"][0]["prefill"] == "prefill-0" and record["routes"][0]["decode"] == "decode-0"
    assert sum(record["split"].values()) == pytest.approx(record["total_s"], rel=0.02)
    assert sum(s["seconds"] for s in record["segments"]) == pytest.approx(record["total_s"])
    assert PROMPT not in json.dumps(slowest)


def test_every_metric_of_the_table_is_told(observed: Observed) -> None:
    observed.post()
    by_cause = {f"baton_{m.name}" for m in WORKER_METRICS if m.labels and m.labels != ("peer",)}
    on_gpus = {f"baton_{m.name}" for m in PROCESS_METRICS if m.name.startswith("gpu_")}
    expected = {f"baton_{m.name}" for m in WORKER_METRICS} - by_cause - on_gpus
    families = observed.metrics_until(lambda families: expected <= families.keys())
    histograms = [m.name for m in WORKER_METRICS if m.kind == "histogram"]

    def counted(families: dict[str, Any], name: str) -> bool:
        samples = families[f"baton_{name}"].samples
        return any(s.value > 0 for s in samples if s.name.endswith("_count"))

    observed.metrics_until(lambda families: all(counted(families, name) for name in histograms))
    assert all(families[name].documentation for name in expected)


def test_workers_tell_their_own_metrics(observed: Observed) -> None:
    observed.post()
    for offset, (name, tables) in enumerate(
        {"prefill-0": SENDER_METRICS, "decode-0": RECEIVER_METRICS}.items()
    ):
        url = f"http://127.0.0.1:{observed.metrics_port + offset}/metrics"
        families = families_of(httpx.get(url, timeout=ARRIVAL_S, trust_env=False).text)
        own: list[Metric] = [metric for metric in tables if not metric.labels]
        for metric in own:
            samples = families[f"baton_{metric.name}"].samples
            assert {sample.labels["worker"] for sample in samples} == {name}
        assert families["process_resident_memory_bytes"].samples[0].value > 0
