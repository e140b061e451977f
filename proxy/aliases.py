"""Metrics under the names of vLLM, so that dashboards made for it work (``--vllm-metric-names``)."""

from collections.abc import Iterable

from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from common.metrics import PREFIX, WORKER_METRICS, Metric

VLLM_PREFIX = "vllm:"


def aliased(told: Iterable[Family], model: str, own: Iterable[Metric]) -> list[Family]:
    """Copies of what has such a name, with the label ``model_name`` that those dashboards select by."""
    names = {PREFIX + m.name: VLLM_PREFIX + m.vllm for m in (*own, *WORKER_METRICS) if m.vllm}
    return [_renamed(family, names[family.name], model) for family in told if family.name in names]


def _renamed(family: Family, name: str, model: str) -> Family:
    alias = Family(name, family.documentation, family.type, family.unit)
    alias.samples = [
        Sample(
            name + sample.name.removeprefix(family.name),
            sample.labels | {"model_name": model},
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
        for sample in family.samples
    ]
    return alias
