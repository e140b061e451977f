"""What a process takes of its machine: CPU time, memory, and the GPU it computes on."""

import psutil

from common import cores, nvml

Gauges = dict[str, float]


class Usage:
    """Of this process. ``gpu_uuid`` names the GPU that it computes on; empty: none. A driver that does not
    answer costs one line in the log, the metrics of the GPU and what is known of its place."""

    def __init__(self, gpu_uuid: str = "") -> None:
        self._process = psutil.Process()
        self._gpu = nvml.find(gpu_uuid) if gpu_uuid else None
        self.locality = {} if self._gpu is None else self._gpu.locality()  # labels, as in a worker's Status
        self.seat = "" if gpu_uuid else cores.seat()  # as there; who computes on a GPU leaves cores to others

    def counters(self) -> dict[str, float]:
        times = self._process.cpu_times()
        return {"process_cpu_seconds_total": times.user + times.system}

    def gauges(self) -> Gauges:
        memory_bytes = float(self._process.memory_info().rss)
        return {"process_resident_memory_bytes": memory_bytes} | (self._gpu.gauges() if self._gpu else {})
