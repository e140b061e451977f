"""What a number type costs in quality: the default model on the golden texts, against itself in float32.

Each text, prompt and the reference's 64 tokens, is read in one go; every position predicts the next token.

    python -m benchmarks.quality
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common import model_source, weights
from common.batch import build
from common.cache import DTYPES, Cache, make_layout
from common.messages import Sampling
from common.model import Model
from common.model_config import ModelConfig
from common.scheduler import Work
from common.sequence import Sequence, SequenceKey
from kernels import select

BLOCK_SIZE = 16
REFERENCE = "float32"
CPU = torch.device("cpu")
GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "smollm2-135m-instruct.json"


class Row(NamedTuple):
    dtype: str
    perplexity: float
    top1_agreement: float  # share of positions whose best token is that of float32
    kl_divergence: float  # of float32's distribution from this one, nats per token


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16"], choices=sorted(set(DTYPES) - {REFERENCE})
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    print("| type | perplexity | against float32 | same best token | KL, nats |\n|---|--:|--:|--:|--:|")
    for row in measure(options.model, options.dtypes, options.threads):
        if row.dtype == REFERENCE:
            base = row.perplexity
        print(
            f"| {row.dtype} | {row.perplexity:.3f} | {100 * (row.perplexity / base - 1):+.2f} % "
            f"| {100 * row.top1_agreement:.2f} % | {row.kl_divergence:.5f} |",
            flush=True,
        )
    return 0


def measure(model: str, dtypes: list[str], num_threads: int) -> Iterator[Row]:
    """The reference first."""
    entries = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    texts = [entry["prompt_ids"] + entry["token_ids"] for entry in entries]
    reference = list(read_all(model, REFERENCE, texts, num_threads))
    yield compare(REFERENCE, texts, reference, iter(reference))
    for dtype in dtypes:
        yield compare(dtype, texts, reference, read_all(model, dtype, texts, num_threads))


def compare(dtype: str, texts: list[list[int]], reference: list[Tensor], found: Iterator[Tensor]) -> Row:
    loss = agreement = divergence = 0.0
    num_positions = sum(len(text) - 1 for text in texts)
    for text, expected, ours in zip(texts, reference, found, strict=True):
        following = torch.tensor(text[1:])
        loss -= float(ours[:-1].gather(1, following[:, None]).sum())
        agreement += float((ours[:-1].argmax(1) == expected[:-1].argmax(1)).sum())
        divergence += float((expected[:-1].exp() * (expected[:-1] - ours[:-1])).sum())
    return Row(dtype, math.exp(loss / num_positions), agreement / num_positions, divergence / num_positions)


def read_all(model: str, dtype: str, texts: list[list[int]], num_threads: int) -> Iterator[Tensor]:
    """Log-probabilities [tokens, vocabulary] of each text."""
    files = model_source.resolve(model)
    config = ModelConfig.load(files.directory)
    loaded = weights.load(files, config, DTYPES[dtype], CPU)
    decoder = Model(config, loaded, select(CPU, num_threads), DTYPES[dtype], CPU)
    layout = make_layout(
        files.fingerprint, dtype, config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE
    )
    num_blocks = -(-max(map(len, texts)) // BLOCK_SIZE)
    cache = Cache(layout, num_blocks, CPU)
    for text in texts:
        sequence = Sequence(SequenceKey("text", 0), text, len(text), Sampling(max_tokens=1), math.inf)
        sequence.block_ids = list(range(num_blocks))
        with torch.inference_mode():
            batch = build([Work(sequence, 0, len(text), False)], BLOCK_SIZE, CPU)
            hidden = decoder.forward(batch.token_ids, batch.attention, cache.layers)
            yield decoder.logits(hidden).log_softmax(-1)


if __name__ == "__main__":
    raise SystemExit(main())
