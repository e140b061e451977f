import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.metrics import WORKER_METRICS, Metric
from proxy.metrics import PROXY_METRICS, WORKER_UP

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
BOARD = DEPLOY / "grafana" / "baton.json"
PROMETHEUS = DEPLOY / "prometheus" / "prometheus.yaml"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"


def series_of(metric: Metric) -> list[str]:
    """The names that queries may use."""
    if metric.kind == "histogram":
        return [f"{metric.full_name}_{part}" for part in ("bucket", "sum", "count")]
    return [metric.full_name]


def board_queries() -> Iterator[str]:
    for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_board_and_the_rules_use_metrics_that_exist() -> None:
    known = {name for m in (*PROXY_METRICS, WORKER_UP, *WORKER_METRICS) for name in series_of(m)}
    queries = [*board_queries(), *(rule["expr"] for rule in rules())]
    used = {name for query in queries for name in re.findall(r"\bbaton_\w+", query)}
    assert len(used) > 40
    assert used - known == set()


def test_the_board_and_the_rules_use_labels_that_exist() -> None:
    labels = {"le", "job", "worker", "role"}
    labels |= {name for m in (*PROXY_METRICS, WORKER_UP, *WORKER_METRICS) for name in m.labels}
    for query in [*board_queries(), *(rule["expr"] for rule in rules())]:
        groups = re.findall(r"by \(([^)]*)\)", query)
        used = {name.strip() for group in groups for name in group.split(",")}
        used |= set(re.findall(r"[{,](\w+)(?==|!|~)", query))
        assert used <= labels, query


def test_panels_of_the_board_do_not_overlap() -> None:
    panels = json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_configuration_and_rules() -> None:
    for words in (["check", "config", str(PROMETHEUS)], ["check", "rules", str(ALERTS)]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_the_boards_queries(tmp_path: Path) -> None:
    queries = [query.replace("$__rate_interval", "1m") for query in board_queries()]
    recorded = [{"record": f"query_{index}", "expr": query} for index, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}), encoding="utf-8")
    words = ["promtool", "check", "rules", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
