"""Whether the workers' weights can fit into this machine's memory, estimated before they are started."""

from pathlib import Path

import psutil

from common.config import ConfigError, EngineConfig
from common.model_config import ModelConfig

_PROCESS_BYTES = 300 << 20  # interpreter and libraries of one worker
_CGROUP = Path("/sys/fs/cgroup")


def require_enough(
    model: str, config: ModelConfig, engines: list[EngineConfig], available_bytes: int, num_gpus: int = 0
) -> None:
    """ConfigError when one worker for each of ``engines`` certainly needs more than there is. Weights on a
    GPU are not counted."""
    on_cpu = [engine for engine in engines if not _uses_gpu(engine.device, num_gpus)]
    needed = sum(worker_bytes(config, engine) for engine in on_cpu)
    if needed > available_bytes:
        raise ConfigError(
            f"--model: {model} in {len(on_cpu)} worker{'s' if len(on_cpu) > 1 else ''} needs at least "
            f"{needed / 2**30:.1f} GiB of memory and {available_bytes / 2**30:.1f} GiB are available; "
            "use fewer workers, a smaller model or a smaller --dtype"
        )


def worker_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """A lower bound: weights in the chosen type (two bytes each if it is left open: the worker decides), and
    the cache if its size is given."""
    weight_bytes = 4 if engine.dtype == "float32" else 2
    return num_parameters(config) * weight_bytes + engine.kv_cache_memory_bytes + _PROCESS_BYTES


def num_parameters(config: ModelConfig) -> int:
    """Of the matrices; norms and biases do not count."""
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_layers * layer + tables * config.vocab_size * config.hidden_size


def available_bytes() -> int:
    """Memory that new processes may take: the machine's, or what the container's limit leaves."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or none with a limit ("max")
        return machine
    return max(0, min(machine, limit - used))


def resident_bytes(pid: int) -> int:
    """Memory that the process holds now, of what it shares with others its part, where the system says so: of
    several processes these add up. 0 when it has ended."""
    try:
        memory = psutil.Process(pid).memory_full_info()
        return int(getattr(memory, "pss", memory.rss))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _uses_gpu(device: str, num_gpus: int) -> bool:
    return device.startswith("cuda") or (device == "auto" and num_gpus > 0)
