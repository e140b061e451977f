"""The machine: processor, cores, memory, limits, GPUs."""

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from common import cores
from control_plane import memory
from control_plane.doctor.findings import Finding

KERNELS_TIMEOUT_S = 180.0  # they may have to be compiled
MIN_OPEN_FILES = 4096
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


def check() -> list[Finding]:
    return [processor(), kernels(), *core_limits(), load(), memory_left(), open_files(), *gpus()]


def processor() -> Finding:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    name = named.get("model name", platform.processor() or platform.machine())
    found = [flag for flag in _FLAGS if flag in named.get("flags", "").split()]
    features = ", ".join(found) or "none of " + ", ".join(_FLAGS)
    advice = "" if found else "expect slow steps: the kernels in C have nothing wider than plain loops to use"
    return Finding("good" if found else "note", "processor", f"{name}; {features}", advice)


def kernels() -> Finding:
    """Asks a process of its own: kernels are compiled where they have never been used."""
    command = [sys.executable, "-m", "kernels.native"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KERNELS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            "warning", "kernels", f"no answer within {KERNELS_TIMEOUT_S:g} s", "look at the compiler"
        )
    if done.returncode == 0:
        return Finding("good", "kernels", f"in C, {done.stdout.strip().removeprefix('kernels ')}")
    reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    text = f"PyTorch will compute, several times slower: {''.join(reason)}"
    compiler = shutil.which("cc") or shutil.which("gcc")
    return Finding("warning", "kernels", text, "" if compiler else "install a C compiler (gcc)")


def core_limits() -> list[Finding]:
    allowed = cores.allowed()
    found = [Finding("good", "cores", f"{len(allowed)}: {', '.join(map(str, allowed))}")]
    try:
        quota, period = _CPU_MAX.read_text().split()
        limit = float(quota) / float(period)
    except (OSError, ValueError):  # no container, or none with a limit ("max")
        return found
    if limit < len(allowed):
        text = (
            f"this container may use {limit:g} of {len(allowed)} cores; threads beyond that stop each other"
        )
        found.append(Finding("warning", "cores", text, "give it whole cores: a cpuset instead of a quota"))
    return found


def load() -> Finding:
    average, count = os.getloadavg()[0], len(cores.allowed())
    text = f"load average {average:.1f} on {count} cores"
    if average < 0.5 * count:
        return Finding("good", "other work", text)
    return Finding("warning", "other work", text, "figures taken now are of the others, too: see top")


def memory_left() -> Finding:
    return Finding("good", "memory", f"{memory.available_bytes() / 2**30:.1f} GiB are available")


def open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit >= MIN_OPEN_FILES:
        return Finding("good", "open files", f"up to {limit}")
    text = f"up to {limit}: as many connections at most, with what else is open"
    return Finding("warning", "open files", text, f"ulimit -n {MIN_OPEN_FILES}")


def gpus() -> list[Finding]:
    """By NVML, without loading CUDA."""
    if importlib.util.find_spec("pynvml") is None:
        if shutil.which("nvidia-smi") is None:
            return [Finding("note", "GPU", "none: workers run on the CPU")]
        return [Finding("warning", "GPU", "NVML cannot be asked", "pip install 'baton-serve[gpu]'")]
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        text = f"none that NVML can see ({error}): workers run on the CPU"
        if shutil.which("nvidia-smi") is None:
            return [Finding("note", "GPU", text)]
        return [Finding("warning", "GPU", text, "look at what nvidia-smi says")]
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu(index, handle, pynvml) for index, handle in enumerate(handles)]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, handle: object, nvml: object) -> Finding:
    name = nvml.nvmlDeviceGetName(handle)  # type: ignore[attr-defined]
    state = nvml.nvmlDeviceGetMemoryInfo(handle)  # type: ignore[attr-defined]
    text = f"{name}, {state.free / 2**30:.1f} of {state.total / 2**30:.1f} GiB free"
    busy = state.free < 0.9 * state.total
    return Finding("warning" if busy else "good", f"GPU {index}", text, "others use it, too" if busy else "")
