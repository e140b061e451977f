"""What number types cost in quality: the default model on the golden texts, against itself in float32.

Each text, prompt and the reference's 64 tokens, is read in one go; every position predicts the next token.
A variant is ``dtype``, ``dtype/quantization`` or ``dtype/quantization/kv-cache-dtype``.

    python -m benchmarks.quality
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from common import model_source, weights
from common.batch import build
from common.cache import DTYPES, Cache, make_layout
from common.config import KvCacheDtype, Quantization
from common.messages import Sampling
from common.model import Model
from common.model_config import ModelConfig
from common.scheduler import Work
from common.sequence import Sequence, SequenceKey
from kernels import select

BLOCK_SIZE = 16
CPU = torch.device("cpu")
DEFAULTS = ["bfloat16", "bfloat16/auto", "bfloat16/int8", "bfloat16/int4"]
GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "smollm2-135m-instruct.json"


class Variant(NamedTuple):
    """As the options of the same names, all resolved."""

    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Quantization = "none"
    kv_cache_dtype: KvCacheDtype = "auto"

    @classmethod
    def read(cls, text: str) -> "Variant":
        try:
            return msgspec.convert(text.split("/"), cls)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from error

    def __str__(self) -> str:
        return "/".join([self.dtype, self.quantization, self.cache_dtype])

    @property
    def cache_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


REFERENCE = Variant("float32")


class Row(NamedTuple):
    variant: Variant
    perplexity: float
    top1_agreement: float  # share of positions whose best token is that of float32
    kl_divergence: float  # of float32's distribution from this one, nats per token


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--variants", nargs="+", type=Variant.read, default=list(map(Variant.read, DEFAULTS)))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    print("| types | perplexity | against float32 | same best token | KL, nats |\n|---|--:|--:|--:|--:|")
    for row in measure(options.model, options.variants, options.threads):
        if row.variant == REFERENCE:
            base = row.perplexity
        print(
            f"| {row.variant} | {row.perplexity:.3f} | {100 * (row.perplexity / base - 1):+.2f} % "
            f"| {100 * row.top1_agreement:.2f} % | {row.kl_divergence:.5f} |",
            flush=True,
        )
    return 0


def measure(model: str, variants: list[Variant], num_threads: int) -> Iterator[Row]:
    """The reference first."""
    entries = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    texts = [entry["prompt_ids"] + entry["token_ids"] for entry in entries]
    reference = list(read_all(model, REFERENCE, texts, num_threads))
    yield compare(REFERENCE, texts, reference, iter(reference))
    for variant in variants:
        yield compare(variant, texts, reference, read_all(model, variant, texts, num_threads))


def compare(
    variant: Variant, texts: list[list[int]], reference: list[Tensor], found: Iterator[Tensor]
) -> Row:
    loss = agreement = divergence = 0.0
    num_positions = sum(len(text) - 1 for text in texts)
    for text, expected, ours in zip(texts, reference, found, strict=True):
        following = torch.tensor(text[1:])
        loss -= float(ours[:-1].gather(1, following[:, None]).sum())
        agreement += float((ours[:-1].argmax(1) == expected[:-1].argmax(1)).sum())
        divergence += float((expected[:-1].exp() * (expected[:-1] - ours[:-1])).sum())
    return Row(variant, math.exp(loss / num_positions), agreement / num_positions, divergence / num_positions)


def read_all(model: str, variant: Variant, texts: list[list[int]], num_threads: int) -> Iterator[Tensor]:
    """Log-probabilities [tokens, vocabulary] of each text."""
    files = model_source.resolve(model)
    config = ModelConfig.load(files.directory)
    dtype = DTYPES[variant.dtype]
    loaded = weights.load(files, config, dtype, CPU)
    decoder = Model(config, loaded, select(CPU, num_threads), dtype, CPU, variant.quantization)
    layout = make_layout(
        files.fingerprint,
        variant.cache_dtype,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        BLOCK_SIZE,
    )
    num_blocks = -(-max(map(len, texts)) // BLOCK_SIZE)
    cache = Cache(layout, num_blocks, CPU)
    for text in texts:
        sequence = Sequence(SequenceKey("text", 0), text, len(text), Sampling(max_tokens=1), math.inf)
        sequence.block_ids = list(range(num_blocks))
        with torch.inference_mode():
            batch = build([Work(sequence, 0, len(text), False)], BLOCK_SIZE, CPU)
            attention = replace(batch.attention, output_rows=None)
            hidden = decoder.forward(batch.token_ids, attention, cache.layers)
            yield decoder.logits(hidden).log_softmax(-1)


if __name__ == "__main__":
    raise SystemExit(main())
