"""What workers measure: name, meaning, label and buckets of every metric, written once.

A worker's report (``Status``) carries values by their short name, with a label's value after a colon
(``transfers_failed_total:deadline``). Proxies show the reports of all workers, and a worker its own where it
has a port for that (``--metrics-port``); both by ``common/exposition.py``.
"""

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "baton_"
WORKER_LABELS = ("worker", "role")

STEP_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
WAIT_BUCKETS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BYTES_BUCKETS = tuple(float(1 << power) for power in range(16, 35, 2))
SEQUENCES_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
TOKENS_BUCKETS = (1.0, 8.0, 32.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class Metric(NamedTuple):
    key: str  # in a worker's report; of a proxy's own metric, empty
    name: str  # as Prometheus shows it, without prefix, and without the _total of counters
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: str = ""  # the same metric's name in vLLM, where it has one

    @property
    def full_name(self) -> str:
        """As queries name it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(key: str, name: str, text: str, *labels: str, vllm: str = "") -> Metric:
    return Metric(key, name, "counter", text, labels, vllm=vllm)


def _gauge(key: str, text: str, vllm: str = "") -> Metric:
    return Metric(key, key, "gauge", text, vllm=vllm)


def _histogram(key: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(key, key, "histogram", text, buckets=buckets)


# Fields of ``Load``, which every report has.
LOAD_METRICS = (
    _gauge("num_requests_running", "Sequences in the worker's steps", "num_requests_running"),
    _gauge("num_requests_waiting", "Sequences in the worker's queue", "num_requests_waiting"),
    _gauge("num_queued_tokens", "Tokens that the worker has yet to compute"),
    _gauge("num_free_blocks", "Blocks that are free or can be evicted"),
    _gauge("num_blocks", "Blocks of the pool"),
    _gauge("num_parked_blocks", "Blocks that wait for a decode worker"),
    _gauge("num_receiving", "Transfers under way into the worker"),
    _gauge("kv_cache_usage_perc", "Share of the blocks in use, from 0 to 1", "kv_cache_usage_perc"),
)

ENGINE_METRICS = (
    _counter("steps_total", "steps", "Steps"),
    _counter(
        "prompt_tokens_total", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache",
        vllm="prefix_cache_queries",
    ),
    _counter(
        "cached_tokens_total", "prefix_cache_hits", "Prompt tokens found there", vllm="prefix_cache_hits"
    ),
    _counter("generation_tokens_total", "worker_generation_tokens", "Output tokens sampled by the worker"),
    _counter(
        "preemptions_total", "num_preemptions", "Sequences that lost their blocks to others",
        vllm="num_preemptions",
    ),
    _histogram("decode_step_seconds", "Duration of steps that compute one token a sequence", STEP_BUCKETS),
    _histogram("prefill_step_seconds", "Duration of steps that compute prompts", STEP_BUCKETS),
    _histogram("step_sequences", "Sequences in a step", SEQUENCES_BUCKETS),
    _histogram("step_tokens", "Tokens computed in a step", TOKENS_BUCKETS),
    _histogram("decode_wait_seconds", "From a sequence taken over to its first step", WAIT_BUCKETS),
)  # fmt: skip

SENDER_METRICS = (
    _counter("transfers_sent_total", "transfers_sent", "Sequences handed over"),
    _counter("transfers_cancelled_total", "transfers_cancelled", "Transfers given up by the prefill side"),
    _counter("transfers_failed_total", "transfers_failed", "Transfers that failed", "reason"),
    _counter("transfer_sent_bytes_total", "transfer_sent_bytes", "Bytes of blocks sent"),
    _counter("transfer_sent_blocks_total", "transfer_sent_blocks", "Blocks sent"),
    _counter("transfer_skipped_blocks_total", "transfer_skipped_blocks", "Blocks that the peer had already"),
    _counter("transfer_link_bytes_total", "transfer_link_bytes", "Bytes of blocks sent, by receiver", "peer"),
    _histogram("transfer_seconds", "From a transfer accepted to the sequence taken over", WAIT_BUCKETS),
    _histogram("exposed_transfer_seconds", "The part of it after the first token", WAIT_BUCKETS),
    _histogram("transfer_bytes", "Bytes of blocks in a transfer", BYTES_BUCKETS),
)

RECEIVER_METRICS = (
    _counter("transfers_received_total", "transfers_received", "Sequences taken over"),
    _counter("transfer_received_bytes_total", "transfer_received_bytes", "Bytes of blocks landed"),
    _counter("transfers_refused_total", "transfers_refused", "Offers refused", "reason"),
    _counter("transfers_abandoned_total", "transfers_abandoned", "Open transfers given up", "reason"),
    _counter(
        "transfer_messages_fenced_total", "transfer_messages_fenced",
        "Payloads and messages turned away because they cannot be right", "reason",
    ),
    _histogram("offer_wait_seconds", "From an offer to room for it", WAIT_BUCKETS),
)  # fmt: skip

PROCESS_METRICS = (
    _counter("process_cpu_seconds_total", "process_cpu_seconds", "CPU time of the worker's process"),
    _gauge("process_resident_memory_bytes", "Resident memory of the worker's process"),
    _gauge("gpu_utilization_ratio", "Share of time in which the worker's GPU computed, from 0 to 1"),
    _gauge("gpu_memory_used_bytes", "Memory in use on the worker's GPU, by all processes"),
    _gauge("gpu_memory_total_bytes", "Memory of the worker's GPU"),
    _gauge("gpu_power_watts", "Power that the worker's GPU draws"),
)

WORKER_METRICS = LOAD_METRICS + ENGINE_METRICS + SENDER_METRICS + RECEIVER_METRICS + PROCESS_METRICS
