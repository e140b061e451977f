"""Which kernels steps ask for after warming up, on a GPU that is not there: nothing is compiled or launched.

``python -m tests.kernels.warmed_up`` prints how many were asked for to warm up, and then a line for each that
some step asks for in addition. A program of its own: Triton decides only once whether it interprets."""

import os
import random
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from benchmarks.gpu.compiled import AbsentGpu
from benchmarks.gpu.models import TINY, build
from benchmarks.gpu.steps import Shape, make_step
from common.cache import Cache, make_layout
from common.graphs import RecordedModel, Step, warm_up
from common.sampler import SamplingOps
from kernels import triton as gpu

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, MAX_TOKENS, MAX_LEN = 16, 600, 40, 320, 800
SHAPE = Shape(
    TINY.num_kv_heads, TINY.num_heads // TINY.num_kv_heads, TINY.head_dim, BLOCK_SIZE, torch.float32
)


def watch() -> list[str]:
    """From now on launches end where a kernel would be compiled; its name comes into the list."""
    asked: list[str] = []
    triton.runtime.driver.set_active(AbsentGpu(90))
    run = JITFunction.run

    def compile_nothing(jitted: Any, key: Any, signature: Any, device: int, *_: Any) -> object:
        asked.append(f"{jitted.fn.__name__} {key}")
        jitted.device_caches[device][0][key] = jitted
        return jitted

    def launch_nothing(jitted: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(jitted, *arguments, grid=grid, warmup=True, **options)

    def choose_all(tuner: Any, *arguments: Any, **options: Any) -> None:
        for config in tuner.configs:
            key = tuple(str(options.get(name)) for name in tuner.keys)
            asked.extend([f"choice for {key}"] * (key not in tuner.cache))
            tuner.cache[key] = config
            tuner.fn.run(*arguments, **options, **config.all_kwargs())

    JITFunction._do_compile, JITFunction.run, Autotuner.run = compile_nothing, launch_nothing, choose_all
    return asked


def again(step: Step) -> Step:
    step()
    return step


def main() -> None:
    asked = watch()
    model = build(TINY, gpu, torch.float32, CPU)
    sizes = (TINY.num_layers, TINY.num_kv_heads, TINY.head_dim, BLOCK_SIZE)
    cache = Cache(make_layout("tiny", "float32", *sizes), NUM_BLOCKS, CPU, staged=True)
    warm_up(model, cache.layers, NUM_BLOCKS, MAX_TOKENS, MAX_NUM_SEQS, SamplingOps(draw, gpu.penalize))
    runner = RecordedModel(model, cache.layers, NUM_BLOCKS, MAX_NUM_SEQS, MAX_LEN, again)
    print(len(asked))
    asked.clear()
    choose = random.Random(7)
    for _ in range(150):
        num_sequences, longest = choose.randint(1, MAX_NUM_SEQS), choose.choice([1, 1, 4, 8, 40, 280])
        lens = [longest] + [choose.choice([1, 1, 1, 5])] * (longest > 1) * (num_sequences - 1)
        lens += [1] * (num_sequences - len(lens))
        batch = make_step([(count, count + choose.randint(0, 200)) for count in lens], SHAPE).batch
        hidden = runner.forward(torch.zeros_like(batch.positions), batch, cache.layers)
        logits = runner.logits(hidden[: len(lens)])
        tokens, ones = torch.zeros(choose.randint(1, 99), dtype=torch.int64), torch.ones(len(lens))
        gpu.penalize(logits, tokens, tokens.int(), tokens > 0, ones, ones, ones)
        draw(list(logits), [(1.0, 0.0, 0, 1.0, 0.5)] * len(logits))
    print("\n".join(asked), end="")


def draw(rows: list[torch.Tensor], choices: list[tuple[float, float, int, float, float]]) -> list[int]:
    return [abs(token) for token in gpu.draw(rows, choices)]


if __name__ == "__main__":
    main()
