"""The floors of Llama 3 8B in bfloat16, on paper: ``python -m benchmarks.gpu.paper``.

Bandwidths and rates are those that the makers of the cards state, for matrices without sparsity; what a
program can get of them is nine tenths or less. Times of kernels are sums over the 32 layers of a step."""

from dataclasses import dataclass

from benchmarks.gpu.costs import Cost, StepShape, step_costs
from benchmarks.gpu.models import LLAMA_8B


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    bytes_per_s: float
    flops_per_s: float  # bfloat16, sums in float32


CARDS = (Card("H100", 3.35e12, 989e12), Card("H200", 4.8e12, 989e12))  # both the SXM form
STEPS = {
    "decode, batch 1, context 2,048": StepShape(1, 1, 2048),
    "decode, batch 64, context 2,048": StepShape(64, 1, 2048),
    "decode, batch 256, context 2,048": StepShape(256, 1, 2048),
    "prefill, 2,048 tokens": StepShape(1, 2048, 2048),
    "prefill, 512 tokens behind 7,680": StepShape(1, 512, 8192),
}
# Bytes per second, one way, as stated; of a network, what its bits come to.
LINKS = {"NVLink 4": 450e9, "PCIe 5 x16": 64e9, "network of 400 Gbit/s": 50e9}


def main() -> None:
    for name, step in STEPS.items():
        print(table(name, step), end="\n\n")
    print(hand_over_table(2048))


def hand_over_table(num_tokens: int) -> str:
    """All keys and values of a prompt over a link, and that as a share of its prefill."""
    num_bytes = 2 * 2.0 * LLAMA_8B.num_layers * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * num_tokens
    prefill = step_costs(LLAMA_8B, StepShape(1, num_tokens, num_tokens))
    card = CARDS[-1]
    computing_s = sum(cost.seconds(card.bytes_per_s, card.flops_per_s) for cost in prefill)
    lines = [
        f"| hand-over, {num_tokens:,} tokens, {num_bytes / 1e6:,.0f} MB | ms | of prefill, {card.name} |",
        "|---|--:|--:|",
    ]
    for name, bytes_per_s in LINKS.items():
        seconds = num_bytes / bytes_per_s
        lines.append(f"| {name} | {1e3 * seconds:.1f} | {seconds / computing_s:.1%} |")
    return "\n".join(lines)


def table(name: str, step: StepShape) -> str:
    costs = step_costs(LLAMA_8B, step)
    heads = [f"{card.name} µs" for card in CARDS]
    lines = [
        f"| {name} | MB | GFLOP | {' | '.join(heads)} | bound by |",
        f"|---|{'--:|' * (2 + len(CARDS))}---|",
    ]
    lines += [row(cost, is_bound_by_memory(cost)) for cost in costs]
    totals = [sum(cost.seconds(card.bytes_per_s, card.flops_per_s) for cost in costs) for card in CARDS]
    moved, computed = sum(c.num_bytes for c in costs), sum(c.flops for c in costs)
    lines.append(
        f"| **whole step** | {moved / 1e6:,.0f} | {computed / 1e9:,.0f} | "
        f"{' | '.join(f'{total * 1e6:,.0f}' for total in totals)} | |"
    )
    rates = " | ".join(f"{step.num_tokens / total:,.0f}" for total in totals)
    lines.append(f"| tokens/s | | | {rates} | |")
    return "\n".join(lines)


def row(cost: Cost, by_memory: bool) -> str:
    times = [f"{cost.seconds(card.bytes_per_s, card.flops_per_s) * 1e6:,.1f}" for card in CARDS]
    bound = "memory" if by_memory else "arithmetic"
    cells = [cost.name, f"{cost.num_bytes / 1e6:,.1f}", f"{cost.flops / 1e9:,.1f}", *times, bound]
    return f"| {' | '.join(cells)} |"


def is_bound_by_memory(cost: Cost) -> bool:
    """On the card with the least bandwidth."""
    slowest = min(CARDS, key=lambda card: card.bytes_per_s)
    return cost.num_bytes / slowest.bytes_per_s >= cost.flops / slowest.flops_per_s


if __name__ == "__main__":
    main()
