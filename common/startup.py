"""From options to a running worker process: the frame that both roles share."""

import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import torch

from common import cores, gpu, logs, model_source, notice, options, sampler, weights
from common.cache import DTYPES, Cache, choose_num_blocks, make_layout
from common.config import (
    ConfigError,
    EngineConfig,
    NetworkConfig,
    StopConfig,
    TraceConfig,
    TransferConfig,
    WorkerConfig,
)
from common.dtypes import resolve_dtype, resolve_quantization
from common.engine import Engine, LanguageModel
from common.grammar import Grammars
from common.graphs import RecordedModel, recorder, warm_up
from common.hosts import ANYWHERE
from common.messages import ModelInfo, Role
from common.metrics_server import metrics_served
from common.model import Model
from common.model_config import ModelConfig, ModelError
from common.secret import Secret, secret_of
from common.service import Service
from common.staging import BlockOps
from common.tokenizer import Tokenizer
from kernels import Ops, cpu, native, select, specification

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2  # it cannot work as it was asked to: no use in starting it again


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker process is given."""

    role: Role
    name: str
    incarnation: str
    engine: EngineConfig
    transfer: TransferConfig
    worker: WorkerConfig
    num_threads: int  # to compute with
    trace: TraceConfig = field(default_factory=TraceConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    secret: Secret | None = None
    stop: StopConfig = field(default_factory=StopConfig)


def main(role: Role, serve: Callable[[Setup], Awaitable[None]]) -> int:
    """Exit code of a worker process: 0 after a drain, 2 when it cannot work as asked."""
    engine, transfer, worker, trace, network, stop = options.parse(
        (EngineConfig, TransferConfig, WorkerConfig, TraceConfig, NetworkConfig, StopConfig),
        prog=f"python -m {role}_worker",
        role=role,
    )
    incarnation = secrets.token_hex(8)
    name = worker.name or f"{role}-{incarnation[:6]}"
    try:
        logs.setup()
        num_threads = cores.pin(worker.cores)
        if worker.proxies and network.discovery:
            raise ConfigError("--proxies and --discovery: give one of them")
        secret = secret_of(network, listening_host(role, worker))
        common = (num_threads, trace, network, secret, stop)
        setup = Setup(role, name, incarnation, engine, transfer, worker, *common)
        asyncio.run(_serve(serve, setup))
    except (ConfigError, ModelError, OSError) as error:
        print(f"{role} worker: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def listening_host(role: Role, worker: WorkerConfig) -> str:
    """Where it listens for transfers, as decode workers alone do. Raises ``ConfigError`` where other workers
    would be told an address that is none."""
    if role != "decode":
        return "127.0.0.1"
    if worker.bind_host in ANYWHERE and not worker.advertise_host:
        raise ConfigError(
            f"--bind-host {worker.bind_host or '*'} needs --advertise-host, by which others reach this worker"
        )
    return worker.bind_host


async def _serve(serve: Callable[[Setup], Awaitable[None]], setup: Setup) -> None:
    await serve(setup)


def build_engine(setup: Setup) -> Engine:
    """Load the model and make the cache. Raises ``ModelError`` or ``ConfigError`` naming what cannot work."""
    config = setup.engine
    files = model_source.resolve(config.model)
    model_config = ModelConfig.load(files.directory)
    tokenizer = Tokenizer.load(files.directory)
    grammars = Grammars.of(tokenizer, model_config.vocab_size, model_config.eos_token_ids)
    grammars.prepare()  # while the weights are read
    device = choose_device(config.device)
    dtype = resolve_dtype(model_config.dtype, device) if config.dtype == "auto" else DTYPES[config.dtype]
    gpu.use(device)
    ops = choose_ops(config.kernels, device, setup.num_threads)
    instruction_set = native.instruction_set() if ops is native else None
    quantization = resolve_quantization(config.quantization, config.dtype, instruction_set)
    loaded = weights.load(files, model_config, dtype, device)
    model = Model(model_config, loaded, ops, dtype, device, quantization)
    computed_as = name_of(dtype) + ("" if quantization == "none" else f"/{quantization}")
    if config.kv_cache_dtype == "int8" and (device.type != "cpu" or config.kernels == "triton"):
        raise ConfigError(f"--kv-cache-dtype: int8 is for CPUs, not for {device} or Triton's kernels")
    max_model_len = choose_max_model_len(config, model_config)
    layout = make_layout(
        files.fingerprint,
        name_of(dtype) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        config.block_size,
        computed_as,
    )
    step_bytes = gpu.step_bytes(model_config, config, dtype)
    num_blocks = choose_num_blocks(config, layout, max_model_len, device, step_bytes)
    cache = Cache(layout, num_blocks, device, block_ops=choose_block_ops(ops))
    served = config.served_model_name or files.name
    info = ModelInfo(served, files.fingerprint, model_config.vocab_size, max_model_len)
    parked = max(1, int(cache.num_blocks * setup.transfer.max_parked_fraction))
    sampling = choose_sampling(ops)
    runner = recorded(model, cache, config, max_model_len, sampling)
    engine = Engine(runner, cache, info, config, model_config.eos_token_ids, parked, grammars, sampling)
    logger.info(
        "%s: %s in %s on %s, %d blocks of %d tokens (%.0f MiB), sequences of up to %d tokens",
        setup.name, served, computed_as, device, cache.num_blocks, config.block_size,
        cache.num_blocks * cache.block_bytes / 2**20, engine.max_sequence_tokens,
    )  # fmt: skip
    return engine


def name_of(dtype: torch.dtype) -> str:
    """As in ``--dtype`` and in layouts."""
    return str(dtype).removeprefix("torch.")


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: must be cpu, cuda, cuda:N or auto, not {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device: there is no {name}: PyTorch sees {torch.cuda.device_count()} GPUs here")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_ops(name: str, device: torch.device, num_threads: int) -> Ops:
    try:
        return select(device, num_threads, name)
    except ValueError as error:
        raise ConfigError(f"--kernels: {error}") from error


def choose_sampling(ops: Ops) -> sampler.SamplingOps:
    """How tokens are drawn where ``ops`` compute."""
    if ops is native:
        return sampler.SamplingOps(native.draw, best=native.best_each)
    if ops is cpu:
        return sampler.PLAIN
    from kernels import triton  # not to be had on every machine

    return sampler.SamplingOps(triton.draw, triton.penalize)


def choose_block_ops(ops: Ops) -> BlockOps:
    """How blocks are packed for transfers where ``ops`` compute."""
    if ops is native or ops is cpu:
        return specification
    from kernels.triton import blocks  # not to be had on every machine

    return blocks


def recorded(
    model: Model, cache: Cache, config: EngineConfig, max_model_len: int, sampling: sampler.SamplingOps
) -> LanguageModel:
    """``model`` with its decode steps recorded, where that can be; PyTorch's attention waits for the
    device."""
    if model.device.type != "cuda" or config.enforce_eager or model.ops is cpu:
        return model
    with torch.inference_mode():
        longest = min(config.lone_step_tokens, max_model_len)
        warm_up(model, cache.layers, cache.num_blocks, longest, config.max_num_seqs, sampling)
        return RecordedModel(
            model, cache.layers, cache.num_blocks, config.max_num_seqs, max_model_len, recorder()
        )


def choose_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len > limit:
        raise ConfigError(f"--max-model-len: the model ends at {limit} tokens, not {config.max_model_len}")
    return config.max_model_len or limit


async def serve_until_drained(service: Service, config: WorkerConfig) -> None:
    """Run the service, and show its metrics where asked to. The first SIGTERM or SIGINT drains it, the
    second ends the process at once."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        service.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    with metrics_served(config, service.status):
        notice.tell_ready()
        await service.run()
