"""Everything on this machine's GPU, in one table: see ``benchmarks/gpu_check.sh``.

Each part is a process of its own, with half of the time that is left: what crashes or hangs there, or fills
the memory, costs the others nothing. ``--tiny`` does the same at sizes that Triton's interpreter gets through
without a GPU; its times mean nothing."""

import argparse
import importlib.util
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import triton

from benchmarks.gpu import agree, models, serving, timing
from benchmarks.gpu.kernels import Bench
from common.model_config import ModelConfig
from kernels import triton as gpu
from kernels.triton import decode

logger = logging.getLogger(__name__)

PARTS = ("agreement", "kernels", "transfers", "small model", "large model")
LEAST_S = 20.0  # for a part to be worth its start
WRONG = 3  # exit status of a part that has told what is wrong
LOAD = serving.Load(prompt_tokens=4096, batches=(1, 8, 64, 256), context=512, steps=32)
TINY_LOAD = serving.Load(prompt_tokens=20, batches=(1, 2), context=10, steps=2)
Pieces = Iterator[Iterator[str]]  # of a part: rows that can fail without the others


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--seconds", type=float, default=420.0, help="of all parts together")
    parser.add_argument("--part", choices=PARTS, help="this one alone, in this process")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        print("there is no GPU that PyTorch sees; --tiny needs none", file=sys.stderr)
        return 2
    table = Table(options.out)
    if options.part:
        if options.tiny:
            decode.PROGRAMS = 8  # each takes milliseconds in the interpreter
        with torch.inference_mode():
            return 0 if Check(options.tiny, table).run(options.part) else WRONG
    table.begin(options.tiny)
    end = time.monotonic() + options.seconds
    results = [run_apart(part, argv, end, table) for part in PARTS]
    return 0 if all(results) else 1


def run_apart(part: str, argv: list[str], end: float, table: "Table") -> bool:
    """Whether all of it was right, in time."""
    left_s = end - time.monotonic()
    if left_s < LEAST_S:
        table.say(f"\n{part}: left out, the time is over")
        return False
    limit_s = left_s if part == PARTS[-1] else left_s / 2
    started = time.monotonic()
    table.say("")
    try:
        status = subprocess.run(command_of(part, argv), timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        table.say(f"\n{part}: not done in {limit_s:.0f} s")
        return False
    if status not in (0, WRONG):
        table.say(f"\n{part}: FAILED, the process ended with {status}")
    table.say(f"\n({time.monotonic() - started:.0f} s)")
    return status == 0


def command_of(part: str, argv: list[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *argv, "--part", part]


class Table:
    def __init__(self, out: Path | None) -> None:
        self._out = out

    def begin(self, is_tiny: bool) -> None:
        if self._out is not None:
            self._out.write_text("")
        card = platform.machine() if is_tiny else torch.cuda.get_device_name(0)
        versions = f"PyTorch {torch.__version__}, Triton {triton.__version__}, CUDA {torch.version.cuda}"
        self.say(f"{card}, {time.strftime('%d %b %Y')}, {versions}, Python {platform.python_version()}")

    def say(self, line: str) -> None:
        print(line, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(line + "\n")


class Check:
    def __init__(self, is_tiny: bool, table: Table) -> None:
        self._is_tiny = is_tiny
        self._device = torch.device("cpu" if is_tiny else "cuda:0")
        self._dtype = torch.float32 if is_tiny else torch.bfloat16
        self._table = table
        self.is_right = True

    def run(self, part: str) -> bool:
        parts: dict[str, Callable[[], Pieces]] = {
            "agreement": self.agreement,
            "kernels": self.kernels,
            "transfers": self.transfers,
            "small model": partial(self.model, "1B", models.LLAMA_1B),
            "large model": partial(self.model, "8B", models.LLAMA_8B),
        }
        return self.tell(parts[part]())

    def tell(self, pieces: Pieces) -> bool:
        """What fails is told and does not keep the other pieces from being run."""
        for rows in pieces:
            try:
                for row in rows:
                    self._table.say(row)
            except Exception as error:
                logger.exception("a piece failed")
                self.is_right = False
                self._table.say(f"| FAILED: {type(error).__name__}: {str(error).partition('. ')[0]} | |")
        return self.is_right

    def agreement(self) -> Pieces:
        heads = "| kernel against the specification | cases | largest error, of what is tolerated | |"
        yield iter((heads, "|---|--:|--:|---|"))
        for cases in agree.KERNELS:
            for dtype in (torch.float32,) if self._is_tiny else tuple(agree.TOLERANCE):
                yield self._agreements(cases, dtype)

    def _agreements(self, cases: agree.Cases, dtype: torch.dtype) -> Iterator[str]:
        found = agree.agreements(cases(self._device, dtype, self._is_tiny), dtype)
        for name, error, count in found:
            self.is_right &= error <= 1
            kind = str(dtype).removeprefix("torch.")
            yield f"| {name}, {kind} | {count} | {error:.3f} | {'ok' if error <= 1 else 'WRONG'} |"

    def kernels(self) -> Pieces:
        large = 1 << (16 if self._is_tiny else 31)
        bytes_per_s = timing.copied_bytes_per_s(self._device, large)
        flops_per_s = timing.multiplied_flops_per_s(self._device, 64 if self._is_tiny else 8192, self._dtype)
        rates = f"Copies {bytes_per_s / 1e12:.2f} TB/s, multiplies {flops_per_s / 1e12:.0f} TFLOP/s.\n"
        heads = "| kernel, one layer | µs | floor µs | time / floor | PyTorch µs |"
        yield iter((rates, heads, "|---|--:|--:|--:|--:|"))
        model = models.TINY if self._is_tiny else models.LLAMA_8B
        sizes = (20, 30, 2) if self._is_tiny else (2048, 2048, 64)
        yield from Bench(model, self._device, self._dtype, *sizes).pieces(bytes_per_s, flops_per_s)

    def transfers(self) -> Pieces:
        yield iter(("| blocks of the large model, between two processes on this device | |", "|---|--:|"))
        if importlib.util.find_spec("zmq") is None:
            yield iter(("| left out: the package zmq is missing | |",))
            return
        from benchmarks.gpu import transfer

        model, dtype = (models.TINY, "float32") if self._is_tiny else (models.LLAMA_8B, "bfloat16")
        yield from transfer.pieces(model, dtype, 6 if self._is_tiny else 128, self._device)

    def model(self, name: str, config: ModelConfig) -> Pieces:
        yield iter((f"| Llama 3 {name}, weights at random | |", "|---|--:|"))
        model = models.build(models.TINY if self._is_tiny else config, gpu, self._dtype, self._device)
        load = TINY_LOAD if self._is_tiny else LOAD
        yield from serving.pieces(name, model, load, not self._is_tiny)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
