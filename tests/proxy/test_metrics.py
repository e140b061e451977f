import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import ProxyConfig
from common.messages import Histogram
from common.metrics import WORKER_METRICS
from proxy.metric_docs import page
from proxy.metrics import PROXY_METRICS, WORKER_UP
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.scripted import LOAD, speaks, speaks_in_two

ROOT = Path(__file__).parent.parent.parent
BODY = {"prompt": "say", "max_tokens": 5}


async def samples_of(system: System) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels."""
    text = (await system.client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_the_page_of_metrics_is_up_to_date() -> None:
    told = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert told == page(), "python -m proxy.metric_docs > docs/metrics.md"


def test_every_metric_has_one_definition() -> None:
    metrics = [*PROXY_METRICS, WORKER_UP, *WORKER_METRICS]
    names = [metric.full_name for metric in metrics]
    assert len(set(names)) == len(names)
    keys = [metric.key for metric in WORKER_METRICS]
    assert len(set(keys)) == len(keys)
    for metric in metrics:
        assert metric.text and (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)


async def test_what_the_proxy_tells_is_what_the_table_names(system: System) -> None:
    await system.worker("decode", speaks(b"hello"))
    await system.client.post("/v1/completions", json=BODY)
    text = (await system.client.get("/metrics")).text
    told = {
        family.name: family.type
        for family in text_string_to_metric_families(text)
        if family.name.startswith("baton_")
    }
    table = {f"baton_{m.name}": m.kind for m in (*PROXY_METRICS, WORKER_UP)}
    assert table.items() <= told.items()
    workers = {f"baton_{m.name}": m.kind for m in WORKER_METRICS}
    assert told.items() <= (table | workers).items()
    assert "_created" not in text


async def test_histograms_of_workers_arrive_whole(system: System) -> None:
    metric = next(m for m in WORKER_METRICS if m.key == "step_sequences")
    counts = (2, 3, *[0] * (len(metric.buckets) - 2), 1)
    odd = {"transfer_seconds": Histogram((1,), 1.0)}
    histograms = {"step_sequences": Histogram(counts, 999.5)} | odd
    worker = await system.worker("decode", histograms=histograms)
    samples = await samples_of(system)
    name, labels = "baton_step_sequences", ("decode", worker.status.name)
    assert samples[f"{name}_bucket", "1.0", *labels] == 2
    assert samples[f"{name}_bucket", "2.0", *labels] == 5
    assert samples[f"{name}_bucket", "+Inf", *labels] == 6
    assert samples[f"{name}_count", *labels] == 6
    assert samples[f"{name}_sum", *labels] == 999.5
    assert not any(key[0].startswith("baton_transfer_seconds") for key in samples)  # other buckets


async def test_values_of_workers_go_by_their_own_names(system: System) -> None:
    decode = await system.worker("decode", gauges={"process_resident_memory_bytes": 5.0})
    counters = {f"transfer_link_bytes_total:{decode.incarnation}": 7.0, "no_such_total": 1.0}
    prefill = await system.worker("prefill", counters=counters)
    samples = await samples_of(system)
    name = decode.status.name
    assert samples["baton_process_resident_memory_bytes", *sorted(["decode", name])] == 5
    link = sorted(["prefill", prefill.status.name, name])
    assert samples["baton_transfer_link_bytes_total", *link] == 7
    assert samples["baton_kv_cache_usage_perc", *sorted(["decode", name])] == 0
    assert samples["baton_num_blocks", *sorted(["decode", name])] == LOAD.num_blocks
    assert not any("no_such" in key[0] for key in samples)


@pytest.mark.parametrize(
    ("config", "num_good"),
    [
        (ProxyConfig(), 1),
        (ProxyConfig(slo_ttft_s=600.0, slo_itl_s=600.0), 1),
        (ProxyConfig(slo_ttft_s=1e-9), 0),
        (ProxyConfig(slo_itl_s=1e-9), 0),
    ],
)
async def test_good_is_what_keeps_to_the_targets(
    model: ServedModel, config: ProxyConfig, num_good: int
) -> None:
    async with system_of(model, config) as system:
        seen = asyncio.Event()
        await system.worker("decode", speaks_in_two(b"hello", seen))
        await system.stream(BODY, seen)
        await system.settled()
        samples = await samples_of(system)
    assert samples["baton_request_success_total", "length"] == 1
    assert samples["baton_requests_good_total",] == num_good


async def test_names_of_vllm_come_when_asked_for(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(vllm_metric_names=True)) as system:
        worker = await system.worker("decode", speaks(b"hello"), counters={"cached_tokens_total": 3.0})
        await system.client.post("/v1/completions", json=BODY)
        samples = await samples_of(system)
    assert samples["vllm:request_success_total", "length", "tiny"] == 1
    assert samples["vllm:generation_tokens_total", "tiny"] == 5
    assert samples["vllm:time_to_first_token_seconds_count", "tiny"] == 1
    hits = sorted(["tiny", "decode", worker.status.name])
    assert samples["vllm:prefix_cache_hits_total", *hits] == 3


async def test_names_of_vllm_do_not_come_by_themselves(system: System) -> None:
    await system.worker("decode")
    assert not any(key[0].startswith("vllm:") for key in await samples_of(system))
