"""What the driver of NVIDIA's GPUs tells of one of them, through NVML (the package nvidia-ml-py)."""

import logging
from typing import Any

logger = logging.getLogger(__name__)

# From the closest on: what GPUs that share a label have between them at worst. Each includes those before it,
# so that two GPUs differ in the more labels the farther apart they are.
LEVELS = ("nvlink", "pcie", "numa")


class Gpu:
    def __init__(self, nvml: Any, uuid: str) -> None:
        """``nvml``: the module pynvml. Raises its ``NVMLError`` where driver or GPU do not answer."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")

    def gauges(self) -> dict[str, float]:
        """By metric name; none when it does not answer."""
        nvml, handle = self._nvml, self._handle
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return {
                "gpu_utilization_ratio": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                "gpu_memory_used_bytes": float(memory.used),
                "gpu_memory_total_bytes": float(memory.total),
                "gpu_power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            }
        except nvml.NVMLError as error:
            logger.debug("the GPU tells nothing: %s", error)
            return {}

    def locality(self) -> dict[str, str]:
        """A label for each of ``LEVELS``: the first of the UUIDs of all GPUs of this machine that are that
        close to it, or to others that are. GPUs of two machines share none."""
        nvml = self._nvml
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            start = uuids.index(str(nvml.nvmlDeviceGetUUID(self._handle)))
        except (
            nvml.NVMLError,
            ValueError,
        ) as error:  # ValueError: a part of a GPU, which has no place in the list
            logger.info("the GPU's place among others is not known: %s", error)
            return {}
        size = range(len(handles))
        distances = [[self._distance(handles[a], handles[b]) if a != b else 0 for b in size] for a in size]
        return {
            level: min(uuids[index] for index in _within(distances, start, distance))
            for distance, level in enumerate(LEVELS)
        }

    def _distance(self, one: Any, other: Any) -> int:
        """Index of the first level that the two share; the number of levels where they share none."""
        nvml = self._nvml
        try:
            linked = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if linked == nvml.NVML_P2P_STATUS_OK:
                return 0
        except nvml.NVMLError:
            pass  # a card without NVLink need not know the question
        try:
            ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
        except nvml.NVMLError:
            return len(LEVELS)
        return (
            1
            if ancestor <= nvml.NVML_TOPOLOGY_HOSTBRIDGE
            else 2
            if ancestor <= nvml.NVML_TOPOLOGY_NODE
            else 3
        )


def _within(distances: list[list[int]], start: int, most: int) -> set[int]:
    """Who can be reached from ``start`` over distances of at most ``most``."""
    found, new = {start}, [start]
    while new:
        near = distances[new.pop()]
        reached = {index for index, distance in enumerate(near) if distance <= most} - found
        found |= reached
        new.extend(reached)
    return found


def find(uuid: str) -> Gpu | None:
    """The GPU of this name; None, and a line in the log, where it cannot be asked."""
    try:
        import pynvml
    except ImportError:
        logger.warning("no metrics of the GPU: the package nvidia-ml-py is not installed")
        return None
    try:
        return Gpu(pynvml, uuid)
    except pynvml.NVMLError as error:
        logger.warning("no metrics of the GPU: %s", error)
        return None
