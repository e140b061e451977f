"""How long a launch takes, and how fast the device copies and multiplies."""

import time
from collections.abc import Callable

import torch
import triton.testing

WARM_UP_MS, MEASURE_MS = 25, 100


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median on a GPU, each time with a cold cache; elsewhere a single run."""
    if device.type == "cuda":
        return float(triton.testing.do_bench(run, WARM_UP_MS, MEASURE_MS, return_mode="median")) / 1e3
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def elapsed(run: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one run, to the end of what it launched."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copied_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Read and written together."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def multiplied_flops_per_s(device: torch.device, size: int, dtype: torch.dtype) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    return float(2 * size**3 / seconds(lambda: a @ a, device))
