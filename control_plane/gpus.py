"""How many GPUs workers of this machine will see, found out without loading CUDA."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

_LIST_TIMEOUT_S = 20.0
_LIST = ("nvidia-smi", "--list-gpus")


def count(environment: Mapping[str, str], list_gpus: Sequence[str] = _LIST) -> int:
    """0 without a driver that answers. ``CUDA_VISIBLE_DEVICES`` counts as it does for CUDA itself."""
    if shutil.which(list_gpus[0]) is None:
        return 0
    try:
        done = subprocess.run(list_gpus, capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    present = sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [word for word in visible.split(",") if word.strip() and word.strip() != "-1"]
    return min(present, len(chosen))


def share(utilization: float, devices: Sequence[str], device: str) -> float:
    """What a worker on ``device`` may take of it when workers on all of ``devices`` start: they divide what
    one alone would take."""
    return utilization / devices.count(device) if device.startswith("cuda") else utilization


def spread(device: str, index: int, num_gpus: int) -> str:
    """The device of worker ``index`` when ``device`` leaves open which GPU: they take turns."""
    if device not in ("auto", "cuda") or num_gpus == 0:
        return device
    return f"cuda:{index % num_gpus}"
