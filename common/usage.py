"""What a process takes of its machine: CPU time, memory, and the GPU it computes on."""

import logging
from collections.abc import Callable

import psutil

logger = logging.getLogger(__name__)

Gauges = dict[str, float]


class Usage:
    """Of this process. ``gpu_uuid`` names the GPU that it computes on; empty: none. A driver that does not
    answer costs one line in the log, and the metrics of the GPU."""

    def __init__(self, gpu_uuid: str = "") -> None:
        self._process = psutil.Process()
        self._read_gpu = _open_gpu(gpu_uuid) if gpu_uuid else dict

    def counters(self) -> dict[str, float]:
        times = self._process.cpu_times()
        return {"process_cpu_seconds_total": times.user + times.system}

    def gauges(self) -> Gauges:
        memory_bytes = float(self._process.memory_info().rss)
        return {"process_resident_memory_bytes": memory_bytes} | self._read_gpu()


def _open_gpu(uuid: str) -> Callable[[], Gauges]:
    try:
        import pynvml  # of the gpu extra
    except ImportError:
        logger.warning("no metrics of the GPU: the package nvidia-ml-py is not installed")
        return dict
    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    except pynvml.NVMLError as error:
        logger.warning("no metrics of the GPU: %s", error)
        return dict

    def read() -> Gauges:
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            return {
                "gpu_utilization_ratio": pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
                "gpu_memory_used_bytes": float(memory.used),
                "gpu_memory_total_bytes": float(memory.total),
                "gpu_power_watts": pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
            }
        except pynvml.NVMLError as error:
            logger.debug("the GPU tells nothing: %s", error)
            return {}

    return read
