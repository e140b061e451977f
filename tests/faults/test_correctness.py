"""Cases COR: what comes out is what a single process would have said."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults import tiny_model
from tests.faults.client import Client, Verdict
from tests.faults.cluster import Cluster, running
from tests.faults.conftest import MAX_MODEL_LEN, SMALL, STEP_TOKENS
from tests.faults.oracle import Case, Oracle
from tests.faults.relay import Faults
from tests.faults.support import (
    ask,
    ask_all,
    assert_equal,
    assert_never_wrong,
    case,
    cases,
    prompt,
    tally,
)
from tests.faults.waiting import eventually

BLOCK_SIZE = 16
TRANSFER_BYTES = 40 * BLOCK_SIZE * tiny_model.KV_BYTES_PER_TOKEN  # of the longest prompts below


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
async def test_replies_stay_right_while_transfers_are_cut(
    cluster: Cluster, client: Client, oracle: Oracle, share: float
) -> None:
    """COR-01."""
    cut = Faults(cut_after_bytes=int(share * TRANSFER_BYTES), max_faults=3)
    asked = cases(16, (300, 640), 12, seed=int(100 * share))
    oracle.references(asked)
    for name in ("d1", "d2"):
        cluster.relays[name].set(forward=cut)
    answers = await ask_all(client, oracle, asked)
    assert_never_wrong(*answers)
    assert tally(answers)[Verdict.EQUAL] >= 14
    assert sum(cluster.relays[name].counts["forward_cuts"] for name in ("d1", "d2")) > 0


async def test_block_boundaries_do_not_show(cluster: Cluster, client: Client, oracle: Oracle) -> None:
    """COR-03: every length from one token to four blocks and two, cold and then from the prefix caches."""
    asked = [case(length, 8, seed=length) for length in range(1, 4 * BLOCK_SIZE + 3)]
    for _ in ("cold", "warm"):
        assert_equal(*await ask_all(client, oracle, asked))


async def test_prompts_over_the_limit_are_refused_before_any_work(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """COR-04."""
    await cluster.quiet()  # what was asked before is counted
    before = (await cluster.workers())["p1"]["counters"]["prompt_tokens_total"]
    for excess in (0, 1, BLOCK_SIZE, MAX_MODEL_LEN):
        refused = await client.http.post(
            "/v1/completions",
            json={"model": "default", "prompt": list(prompt(MAX_MODEL_LEN + excess)), "max_tokens": 1},
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert_equal(
        await ask(client, oracle, case(MAX_MODEL_LEN - 1, 1)),
        await ask(client, oracle, case(MAX_MODEL_LEN - 2, 2)),
    )
    await cluster.quiet()
    after = (await cluster.workers())["p1"]["counters"]["prompt_tokens_total"]
    assert after - before <= 2 * MAX_MODEL_LEN


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16])
@pytest.mark.parametrize("stream", [False, True])
async def test_exactly_max_tokens_come_out(
    cluster: Cluster, client: Client, oracle: Oracle, max_tokens: int, stream: bool
) -> None:
    """COR-05."""
    extra = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await ask(client, oracle, case(50, max_tokens), stream, **extra)
    assert_equal(answer)
    assert answer.reply.usage["completion_tokens"] == max_tokens
    chat = await client.send(
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": [{"role": "user", "content": "hello"}],
            "max_completion_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
    )
    assert (chat.usage["completion_tokens"], chat.finish_reason) == (max_tokens, "length")


async def test_the_first_token_obeys_the_sampling_parameters(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """COR-06."""
    asked = case(30, 2)
    greedy = oracle.reference(asked).token_ids[0]
    forbidden = await client.complete(asked, logit_bias={str(greedy): -100})
    assert forbidden.ok and forbidden.token_ids[0] != greedy
    drawn = await asyncio.gather(
        *(client.complete(Case(asked.prompt, 1, 1.0, seed), temperature=2.0) for seed in range(40))
    )
    assert len({reply.token_ids[0] for reply in drawn}) > 3
    best = await client.complete(asked, temperature=2.0, top_k=1)
    assert best.token_ids[0] == greedy


@pytest.mark.parametrize("at_once", [1, 8])
async def test_prompts_of_many_chunks_arrive_whole(
    cluster: Cluster, client: Client, oracle: Oracle, at_once: int
) -> None:
    """COR-07."""
    lengths = [STEP_TOKENS, STEP_TOKENS + 1, 2 * STEP_TOKENS, 7 * STEP_TOKENS // 2, 7 * STEP_TOKENS]
    asked = [case(length, 16, seed=at_once * 1000 + length) for length in lengths]
    assert_equal(*await ask_all(client, oracle, asked, at_once=at_once))


async def test_many_large_transfers_at_once_do_not_mix(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """COR-08: also more than the pools hold at once."""
    asked = cases(16, (400, 900), 12, seed=8)
    for _ in range(2):
        assert_equal(*await ask_all(client, oracle, asked, at_once=16))


@pytest.mark.parametrize(
    ("options", "field"),
    [(["--block-size=32"], "block_size"), (["--kv-cache-dtype=bfloat16"], "dtype")],
)
async def test_a_worker_whose_cache_differs_is_refused_with_the_field_named(
    cluster: Cluster, client: Client, oracle: Oracle, options: Sequence[str], field: str
) -> None:
    """COR-09."""
    with cluster.extra("d3", options):
        refused = await eventually(lambda: state_of(cluster, "d3"), 60.0)
        assert refused["state"] == "refused"
        assert field in refused["reason"]
        assert_equal(*await ask_all(client, oracle, cases(6, 100, 6, seed=9)))


async def test_a_worker_with_other_weights_is_refused(
    cluster: Cluster, client: Client, oracle: Oracle, tmp_path: Path
) -> None:
    """COR-11: the same name, tokenizer and shape, but another model."""
    other = tiny_model.write(tmp_path / "tiny", seed=1)
    with cluster.extra("d3", [f"--model={other}"]):
        refused = await eventually(lambda: state_of(cluster, "d3"), 60.0)
        assert refused["state"] == "refused"
        assert "model_fingerprint" in refused["reason"]
        assert_equal(*await ask_all(client, oracle, cases(6, 100, 6, seed=11)))


async def state_of(cluster: Cluster, name: str) -> dict[str, object] | None:
    return (await cluster.workers()).get(name)


async def test_features_of_one_side_alone_do_not_change_the_output(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """COR-09: no prefix cache on the decode side, other batch sizes, other piece sizes."""
    decode = [
        "--no-enable-prefix-caching",
        "--max-num-batched-tokens=32",
        "--max-num-seqs=4",
        "--num-blocks=70",
    ]
    async with running(tmp_path, str(model), options=SMALL, decode_options=decode) as cluster:
        async with Client(cluster.url) as client:
            asked = cases(8, (30, 300), 12, seed=12)
            for _ in ("cold", "warm"):
                assert_equal(*await ask_all(client, oracle, asked))
        await cluster.quiet()


async def test_what_is_computed_again_after_a_loss_is_the_same(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """COR-10: prefill workers die in the middle of transfers; then the same prompts once more, now cached."""
    asked = cases(24, (200, 600), 8, seed=10)
    oracle.references(asked)
    for name in ("d1", "d2"):
        cluster.relays[name].set(forward=Faults(bytes_per_s=3e6))
    asking = asyncio.create_task(ask_all(client, oracle, asked))
    await eventually(lambda: cluster.relays["d1"].counts["forward_bytes"] > 100_000, 30.0)
    cluster.restart("p1")
    answers = await asking
    assert_equal(*answers)
    assert_equal(*await ask_all(client, oracle, asked))


async def test_salted_prompts_share_no_cache_and_say_the_same(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """COR-11: a salt keeps prefix caches apart, and changes nothing else."""
    asked = case(200, 6, seed=77)
    for salt in ("one", "two"):
        answer = await ask(client, oracle, asked, cache_salt=salt)
        assert_equal(answer)
        assert answer.reply.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
    again = await ask(client, oracle, asked, cache_salt="one")
    assert_equal(again)


async def test_a_corpus_of_all_kinds_is_equal(cluster: Cluster, client: Client, oracle: Oracle) -> None:
    """COR-12."""
    texts = ["a", "naïve café – 東京 🚲", "def f(x):\n\treturn x + 1\n", "x" * 700, "\x00\x01", "word " * 60]
    asked = [Case(tuple(text.encode()), 24) for text in texts] + cases(20, (1, 700), 24, seed=13)
    assert_equal(*await ask_all(client, oracle, asked))


async def test_cold_warm_and_batched_are_equal(cluster: Cluster, client: Client, oracle: Oracle) -> None:
    """COR-13."""
    asked = case(333, 32, seed=131313)
    cold = await ask(client, oracle, asked)
    warm = await ask(client, oracle, asked)
    batched = await ask_all(client, oracle, [asked, *cases(7, (100, 400), 32, seed=14)])
    assert_equal(cold, warm, *batched)


async def test_a_decode_worker_that_is_far_behind_still_gets_what_was_computed(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """COR-02: blocks are kept until they have landed, however long that takes; no lease runs out."""
    options = [*SMALL, "--stall-timeout-s=1"]
    decode = ["--max-num-seqs=1"]
    async with running(tmp_path, str(model), options=options, decode_options=decode) as cluster:
        async with Client(cluster.url) as client:
            asked = [case(100, 600, seed=2), *(case(150, 8, seed=200 + index) for index in range(6))]
            assert_equal(*await ask_all(client, oracle, asked, at_once=7))
        await cluster.quiet()
