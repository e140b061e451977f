"""Every option of Baton, written once.

A field is an option: ``max_num_seqs`` is ``--max-num-seqs`` on the command line, ``BATON_MAX_NUM_SEQS`` in
the environment and ``max-num-seqs`` in a cluster file. ``common/options.py`` derives all three, and the table
in the docs, from these classes. Objects are frozen and checked when made; a bad value raises ``ConfigError``
naming the option.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.hosts import ANYWHERE

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Quantization = Literal["auto", "none", "int8", "int4"]
Policy = Literal[
    "cost", "least_loaded", "prefix_aware", "consistent_hash", "round_robin", "power_of_two", "random"
]
Kernels = Literal["auto", "native", "torch", "triton"]
DEFAULT_MODEL = "smollm2-135m-instruct"
STEP_TOKENS = 512
DEFAULT_PROXIES = ("tcp://127.0.0.1:7000",)
CONTROL_ADDRESS = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}")
_ETCD = re.compile(r"etcd://[^\s/,@]+:[0-9]{1,5}(,[^\s/,@]+:[0-9]{1,5})*(/\S*)?")


class ConfigError(ValueError):
    """An option that cannot work; the text names it."""


def option(default: Any, text: str, secret: bool = False) -> Any:
    """A configuration field with its one-line description. A ``secret`` is never put on a command line."""
    return field(default=default, metadata={"help": text, "secret": secret})


def require(condition: bool, name: str, text: str) -> None:
    if not condition:
        raise ConfigError(f"--{name.replace('_', '-')} {text}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine computes with."""

    model: str = option(DEFAULT_MODEL, "model directory, GGUF file, hub id, or the built-in default model")
    served_model_name: str = option("", "name of the model in the API; default: the last part of --model")
    device: str = option("auto", "cpu, cuda, cuda:N or auto")
    kernels: Kernels = option(
        "auto", "what computes: native (C, for CPUs), triton or torch; auto: the fastest for the device"
    )
    dtype: Dtype = option("auto", "type of weights and activations")
    quantization: Quantization = option(
        "auto",
        "weights as whole numbers; auto: on a CPU without --dtype, int8 with AVX-512 but no AMX, otherwise"
        " 4 bits where a GGUF file has 4, and int8 elsewhere",
    )
    kv_cache_dtype: KvCacheDtype = option(
        "auto", "type of the KV cache; auto: the same as --dtype; int8: on CPUs, a scale per token and head"
    )
    block_size: int = option(16, "token positions per KV block")
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory that the worker may take, weights and KV cache together"
    )
    enforce_eager: bool = option(False, "on a GPU, launch kernels one by one instead of recorded steps")
    kv_cache_memory_bytes: int = option(0, "memory for the KV cache; 0: chosen from the memory at hand")
    num_blocks: int = option(0, "number of KV blocks; 0: from --kv-cache-memory-bytes")
    max_model_len: int = option(0, "longest sequence, prompt and output; 0: the model's own limit")
    max_num_seqs: int = option(64, "sequences in one step at most")
    max_num_batched_tokens: int = option(
        0, "tokens computed in one step at most; long prompts are cut to it; 0: 512, of a prompt alone 1024"
    )
    max_waiting_seqs: int = option(256, "queued sequences at most; more are refused with 429")
    enable_prefix_caching: bool = option(True, "keep blocks of finished sequences for later prompts")
    tensor_parallel_size: int = option(1, "devices that share one model")
    check_invariants: bool = option(False, "verify block accounting after every step")

    def __post_init__(self) -> None:
        require(self.block_size > 0, "block_size", f"must be at least 1, not {self.block_size}")
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "gpu_memory_utilization", f"must lie in (0, 1], not {share:g}")
        require(self.max_num_seqs > 0, "max_num_seqs", f"must be at least 1, not {self.max_num_seqs}")
        require(self.max_num_batched_tokens >= 0, "max_num_batched_tokens", "must not be negative")
        require(self.max_model_len >= 0, "max_model_len", "must not be negative")
        require(self.max_waiting_seqs > 0, "max_waiting_seqs", "must be at least 1")
        require(self.num_blocks >= 0, "num_blocks", "must not be negative")
        require(self.kv_cache_memory_bytes >= 0, "kv_cache_memory_bytes", "must not be negative")
        require(self.tensor_parallel_size == 1, "tensor_parallel_size", "other than 1 is not supported yet")

    @property
    def step_tokens(self) -> int:
        """Tokens computed in one step at most, where several sequences are there."""
        return self.max_num_batched_tokens or STEP_TOKENS

    @property
    def lone_step_tokens(self) -> int:
        """And where one alone is: nobody else waits for the step to end."""
        return self.max_num_batched_tokens or 2 * STEP_TOKENS


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How blocks travel between workers."""

    transport: str = option("auto", "auto, zmq (TCP), ipc (shared memory), ucx or inproc")
    piece_bytes: int = option(2 << 20, "bytes sent as one message; runs of blocks are cut to it")
    credit_bytes: int = option(16 << 20, "bytes in flight per transfer at most")
    layer_groups: int = option(
        3,
        "parts in which the layers of a long enough prompt leave while it is computed; 1: blocks leave whole",
    )
    checksums: bool = option(True, "verify every payload with a 64-bit hash")
    max_parked_fraction: float = option(
        0.5, "share of a prefill worker's blocks that may wait for decode workers"
    )
    stall_timeout_s: float = option(5.0, "a transfer without progress for this long has failed")

    def __post_init__(self) -> None:
        names = ("auto", "zmq", "ipc", "ucx", "inproc")
        require(
            self.transport in names, "transport", f"must be one of {', '.join(names)}, not {self.transport!r}"
        )
        require(self.piece_bytes >= 1024, "piece_bytes", "must be at least 1024")
        require(self.credit_bytes >= self.piece_bytes, "credit_bytes", "must be at least --piece-bytes")
        require(self.layer_groups >= 1, "layer_groups", "must be at least 1")
        require(0 < self.max_parked_fraction <= 1, "max_parked_fraction", "must lie in (0, 1]")
        require(self.stall_timeout_s > 0, "stall_timeout_s", "must be positive")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process."""

    name: str = option("", "name in logs and metrics; default: role and process id")
    proxies: tuple[str, ...] = option(
        (), "control addresses of the proxies to announce to; default: tcp://127.0.0.1:7000, or --discovery"
    )
    bind_host: str = option("127.0.0.1", "address to listen on for transfers")
    advertise_host: str = option("", "address other workers use; default: --bind-host, if it is one")
    transfer_port: int = option(0, "port to listen on for transfers; 0: any free one")
    locality: tuple[str, ...] = option(
        (), "where it runs, as host=a,rack=b: pairs that share labels are taken to be close to each other"
    )
    cores: tuple[int, ...] = option((), "CPU cores to run on; default: all that the process may use")
    metrics_port: int = option(
        0, "port of the worker's own /metrics; baton serve counts up from it for further workers; 0: none"
    )
    metrics_host: str = option("127.0.0.1", "address of it")
    heartbeat_interval_s: float = option(0.5, "time between status messages")

    def __post_init__(self) -> None:
        for address in self.proxies:
            fits = CONTROL_ADDRESS.fullmatch(address) is not None
            require(fits, "proxies", f"must be addresses such as tcp://host:7000, not {address!r}")
        for name in ("transfer_port", "metrics_port"):
            require(0 <= getattr(self, name) < 65536, name, "must lie in 0..65535")
        require(self.heartbeat_interval_s > 0, "heartbeat_interval_s", "must be positive")
        self.locality_labels()

    def locality_labels(self) -> dict[str, str]:
        """Raises ``ConfigError`` for what is no label."""
        labels = {}
        for label in self.locality:
            name, _, value = label.partition("=")
            require(bool(name and value), "locality", f"must be labels such as host=a, not {label!r}")
            labels[name] = value
        return labels


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The HTTP front end."""

    host: str = option("127.0.0.1", "address of the HTTP API")
    port: int = option(8000, "port of the HTTP API")
    own_port: int = option(0, "a second port of the HTTP API, this process's alone; 0: none")
    sibling_ports: tuple[int, ...] = option(
        (), "--own-port of each proxy that shares --port with this one, its own included"
    )
    control_host: str = option("127.0.0.1", "address that workers announce themselves to")
    control_port: int = option(7000, "port that workers announce themselves to")
    control_advertise_host: str = option(
        "", "address that workers find with --discovery; default: --control-host"
    )
    api_key: tuple[str, ...] = option(
        (), "keys that clients must send as bearer token; none: open", secret=True
    )
    api_key_file: str = option(
        "", "file with more such keys, one on a line; lines that begin with # are none"
    )
    admin_key: tuple[str, ...] = option(
        (), "keys that may also drain and remove workers; none: nobody may", secret=True
    )
    ssl_certfile: str = option("", "certificate (PEM, with its chain): the API speaks HTTPS")
    ssl_keyfile: str = option("", "key of the certificate; default: in the same file")
    allowed_origins: tuple[str, ...] = option((), "web origins whose pages may call the API; *: all")
    stream_keep_alive_s: float = option(15.0, "a stream silent for this long gets a comment; 0: never")
    max_queued_requests: int = option(512, "requests in flight at most; more are refused with 429")
    max_body_bytes: int = option(16 << 20, "largest HTTP request body")
    request_timeout_s: float = option(600.0, "deadline of a request that names none")
    max_attempts: int = option(4, "times a request is dispatched before it fails")
    dead_after_s: float = option(2.0, "a worker silent for this long is taken for dead")
    worker_wait_s: float = option(30.0, "a request waits this long for workers that have gone to come back")
    tool_call_parser: str = option(
        "auto", "how the model writes calls: hermes, qwen3_coder or llama3_json; auto: as its template tells"
    )
    reasoning_parser: str = option(
        "auto", "deepseek_r1 or qwen3: <think> tags are told apart; none; auto: as the chat template tells"
    )
    slo_ttft_s: float = option(0.0, "target for the time to the first token; goodput counts it; 0: none")
    slo_itl_s: float = option(0.0, "target for the mean time between tokens; goodput counts it; 0: none")
    vllm_metric_names: bool = option(False, "tell metrics under the names of vLLM, too, for its dashboards")
    router_policy: Policy = option("cost", "how workers are chosen, see docs/operations.md")
    prefill_policy: Literal[Policy, "same"] = option("same", "how prefill workers are, if otherwise")
    decode_policy: Literal[Policy, "same"] = option("same", "how decode workers are, if otherwise")
    slo_admission: Literal["best_effort", "refuse"] = option(
        "best_effort", "refuse: requests that would miss --slo-ttft-s or --slo-itl-s get 429 instead"
    )
    disaggregate: Literal["auto", "always", "never"] = option(
        "auto", "auto: decode workers also prefill what costs less there; needs the cost policy"
    )
    prefill_fallback: bool = option(
        True, "decode workers prefill too while there is no prefill worker; off: requests get 503"
    )

    def __post_init__(self) -> None:
        for name in ("port", "own_port", "control_port"):
            require(0 <= getattr(self, name) < 65536, name, "must lie in 0..65535")
        is_one_place = self.host == self.control_host or bool(
            ANYWHERE.keys() & {self.host, self.control_host}
        )
        is_taken = is_one_place and self.port == self.control_port != 0
        require(not is_taken, "control_port", f"must be another than --port, {self.port}")
        known = not self.sibling_ports or (self.own_port > 0 and self.own_port in self.sibling_ports)
        require(known, "sibling_ports", f"must name --own-port, {self.own_port}, too")
        require(self.max_attempts > 0, "max_attempts", "must be at least 1")
        require(self.stream_keep_alive_s >= 0, "stream_keep_alive_s", "must not be negative")
        require(not self.ssl_keyfile or bool(self.ssl_certfile), "ssl_keyfile", "needs --ssl-certfile")
        require(self.max_queued_requests > 0, "max_queued_requests", "must be at least 1")
        require(self.request_timeout_s > 0, "request_timeout_s", "must be positive")
        require(self.dead_after_s > 0, "dead_after_s", "must be positive")
        require(self.worker_wait_s >= 0, "worker_wait_s", "must not be negative")
        require(self.slo_ttft_s >= 0, "slo_ttft_s", "must not be negative")
        require(self.slo_itl_s >= 0, "slo_itl_s", "must not be negative")
        parsers = ("auto", "hermes", "qwen3_coder", "llama3_json")
        require(self.tool_call_parser in parsers, "tool_call_parser", f"must be one of {', '.join(parsers)}")
        parsers = ("auto", "none", "deepseek_r1", "qwen3")
        require(self.reasoning_parser in parsers, "reasoning_parser", f"must be one of {', '.join(parsers)}")

    def all_keys(self) -> tuple[str, ...]:
        """Those of the file included. Raises ``ConfigError`` when it cannot be read or holds none: a server
        meant to be closed must not be open."""
        if not self.api_key_file:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {error}") from error
        keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
        require(len(keys) > 0, "api_key_file", f"{self.api_key_file} holds no keys")
        return self.api_key + keys


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Where spans of requests go, from proxies and workers."""

    otlp_endpoint: str = option(
        "", "OTLP over HTTP, such as http://127.0.0.1:4318; needs the traces extra; none: no traces"
    )

    def __post_init__(self) -> None:
        is_url = self.otlp_endpoint.startswith(("http://", "https://"))
        require(not self.otlp_endpoint or is_url, "otlp_endpoint", "must begin with http:// or https://")


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """What proxies and workers do about others on their network."""

    secret_file: str = option(
        "", "written by baton keygen: encrypts what proxies and workers say, and keeps out who lacks it"
    )
    trusted_network: bool = option(
        False, "UCX, which encrypts nothing, may be used beyond loopback addresses"
    )
    discovery: str = option("", "etcd://HOST:PORT,.../PREFIX, where workers find proxies; none: by --proxies")

    def __post_init__(self) -> None:
        fits = not self.discovery or _ETCD.fullmatch(self.discovery) is not None
        require(fits, "discovery", f"must be such as etcd://host:2379/baton, not {self.discovery!r}")


@dataclass(frozen=True, slots=True)
class StopConfig:
    """How proxies and workers end."""

    drain_timeout_s: float = option(30.0, "time to finish running requests after SIGTERM")

    def __post_init__(self) -> None:
        require(self.drain_timeout_s >= 0, "drain_timeout_s", "must not be negative")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What ``baton serve`` starts on this machine."""

    prefill: int = option(1, "prefill workers to start")
    decode: int = option(1, "decode workers to start")
    proxy_workers: int = option(1, "proxy processes to start; they share --port")
    colocated: bool = option(False, "no prefill workers: decode workers do both halves")
    start_timeout_s: float = option(300.0, "time for all processes to become ready")

    def __post_init__(self) -> None:
        require(self.prefill >= 0, "prefill", f"must not be negative, not {self.prefill}")
        require(self.decode >= 1, "decode", f"must be at least 1, not {self.decode}")
        require(self.proxy_workers >= 1, "proxy_workers", f"must be at least 1, not {self.proxy_workers}")
        require(self.start_timeout_s > 0, "start_timeout_s", "must be positive")


ALL_CONFIGS = (
    EngineConfig,
    TransferConfig,
    WorkerConfig,
    ProxyConfig,
    TraceConfig,
    NetworkConfig,
    StopConfig,
    ServeConfig,
)
