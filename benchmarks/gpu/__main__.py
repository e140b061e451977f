"""Everything on this machine's GPU, in one table: see ``benchmarks/gpu_check.sh``.

``--tiny`` does the same at sizes that Triton's interpreter gets through without a GPU; its times mean
nothing."""

import argparse
import importlib.util
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from benchmarks.gpu import agree, models, serving, timing
from benchmarks.gpu.kernels import Bench, lines
from common.messages import Refusal
from common.model_config import ModelConfig
from kernels import triton as gpu

LOAD = serving.Load(prompt_tokens=4096, batches=(1, 8, 64, 256), context=512, steps=32)
TINY_LOAD = serving.Load(prompt_tokens=20, batches=(1, 2), context=10, steps=2)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="parts that would begin later are left out"
    )
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        print("there is no GPU that PyTorch sees; --tiny needs none", file=sys.stderr)
        return 2
    check = Check(options.tiny, options.out, time.monotonic() + options.seconds)
    with torch.inference_mode():
        for part in (
            check.agreement, check.kernels, check.transfers, check.small_model, check.large_model
        ):  # fmt: skip
            check.run(part.__name__, part())
    return 0 if check.is_right else 1


class Check:
    def __init__(self, is_tiny: bool, out: Path | None, end: float) -> None:
        self._is_tiny = is_tiny
        self._device = torch.device("cpu" if is_tiny else "cuda:0")
        self._dtype = torch.float32 if is_tiny else torch.bfloat16
        self._out = out
        self._end = end
        self.is_right = True
        if out is not None:
            out.write_text("")
        card = platform.machine() if is_tiny else torch.cuda.get_device_name(self._device)
        today = time.strftime("%d %b %Y")
        self.say(f"{card}, {today}, PyTorch {torch.__version__}, Triton {triton.__version__}")

    def say(self, line: str) -> None:
        print(line, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(line + "\n")

    def run(self, name: str, rows: Iterator[str]) -> None:
        """What fails is told and does not keep the other parts from being run."""
        if time.monotonic() > self._end:
            self.is_right = False
            return self.say(f"\n{name.replace('_', ' ')}: left out, the time is over")
        started = time.monotonic()
        self.say("")
        try:
            for row in rows:
                self.say(row)
        except (RuntimeError, AssertionError, ValueError, OSError, Refusal, TritonError) as error:
            self.is_right = False
            self.say(f"\n{name.replace('_', ' ')}: FAILED, {type(error).__name__}: {error}")
        self.say(f"\n({time.monotonic() - started:.0f} s)")

    def agreement(self) -> Iterator[str]:
        dtypes = (torch.float32,) if self._is_tiny else (torch.bfloat16, torch.float16, torch.float32)
        yield "| kernel against the specification | cases | largest error, of what is tolerated | |"
        yield "|---|--:|--:|---|"
        for name, error, count in agree.agreements(self._device, dtypes, self._is_tiny):
            self.is_right &= error <= 1
            yield f"| {name} | {count} | {error:.3f} | {'ok' if error <= 1 else 'WRONG'} |"

    def kernels(self) -> Iterator[str]:
        large = 1 << (16 if self._is_tiny else 31)
        bytes_per_s = timing.copied_bytes_per_s(self._device, large)
        flops_per_s = timing.multiplied_flops_per_s(self._device, 64 if self._is_tiny else 8192, self._dtype)
        yield f"Copies {bytes_per_s / 1e12:.2f} TB/s, multiplies {flops_per_s / 1e12:.0f} TFLOP/s.\n"
        yield "| kernel, one layer | µs | floor µs | time / floor | PyTorch µs |"
        yield "|---|--:|--:|--:|--:|"
        model = models.TINY if self._is_tiny else models.LLAMA_8B
        sizes = (20, 30, 2) if self._is_tiny else (2048, 2048, 64)
        yield from lines(Bench(model, self._device, self._dtype, *sizes), bytes_per_s, flops_per_s)

    def transfers(self) -> Iterator[str]:
        yield "| blocks of the large model, between two processes on this device | |"
        yield "|---|--:|"
        if importlib.util.find_spec("zmq") is None:
            yield "| left out: the package zmq is missing | |"
            return
        from benchmarks.gpu import transfer

        model, dtype = (models.TINY, "float32") if self._is_tiny else (models.LLAMA_8B, "bfloat16")
        yield from transfer.lines(model, dtype, 6 if self._is_tiny else 128, self._device)

    def small_model(self) -> Iterator[str]:
        return self._serve("1B", models.TINY if self._is_tiny else models.LLAMA_1B)

    def large_model(self) -> Iterator[str]:
        return self._serve("8B", models.TINY if self._is_tiny else models.LLAMA_8B)

    def _serve(self, name: str, config: ModelConfig) -> Iterator[str]:
        yield f"| Llama 3 {name}, weights at random | |"
        yield "|---|--:|"
        model = models.build(config, gpu, self._dtype, self._device)
        load = TINY_LOAD if self._is_tiny else LOAD
        yield from serving.lines(name, model, load, not self._is_tiny)


if __name__ == "__main__":
    sys.exit(main())
