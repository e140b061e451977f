"""Where a GPU is, from answers as drivers of machines of several kinds give them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from common.nvml import Gpu
from common.usage import Usage
from proxy.cost import transfer_time
from proxy.fleet import fleet_of
from tests.proxy.test_cost import NEED, worker

LINK, SWITCH, BRIDGE, NODE, SYSTEM = "nvlink", 10, 30, 40, 50  # how two GPUs reach each other
GIB = 1 << 30


class NoAnswer(Exception):
    pass


class Driver:
    """What pynvml is asked for, with ``paths[a][b]`` between GPUs a and b; a path of None is not told."""

    NVMLError = NoAnswer
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE = 30, 40

    def __init__(self, paths: list[list[Any]], machine: str = "a") -> None:
        self._paths = paths
        self._machine = machine

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self._paths)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{self._machine}{handle}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid[-1])

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        assert capability == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if self._paths[one][other] == LINK else 5  # 5: NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        path = self._paths[one][other]
        if path is None:
            raise NoAnswer("Not Supported")
        return SYSTEM if path == LINK else int(path)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=GIB, total=4 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 70_500


def between(count: int, path: Any, **others: Any) -> list[list[Any]]:
    """``path`` between any two of ``count`` GPUs, or what ``others`` say, as g01=... for GPUs 0 and 1."""
    return [[others.get(f"g{min(a, b)}{max(a, b)}", path) for b in range(count)] for a in range(count)]


def places(driver: Driver) -> list[dict[str, str]]:
    return [Gpu(driver, f"GPU-{driver._machine}{i}").locality() for i in range(driver.nvmlDeviceGetCount())]


def test_gpus_on_one_switch_of_nvlinks_are_close_wherever_their_slots_are() -> None:
    found = places(Driver(between(4, LINK)))
    assert found == [{"nvlink": "GPU-a0", "pcie": "GPU-a0", "numa": "GPU-a0"}] * 4


def test_without_nvlinks_slots_decide() -> None:
    found = places(Driver(between(4, SYSTEM, g01=SWITCH, g23=NODE)))
    assert found == [
        {"nvlink": "GPU-a0", "pcie": "GPU-a0", "numa": "GPU-a0"},
        {"nvlink": "GPU-a1", "pcie": "GPU-a0", "numa": "GPU-a0"},
        {"nvlink": "GPU-a2", "pcie": "GPU-a2", "numa": "GPU-a2"},
        {"nvlink": "GPU-a3", "pcie": "GPU-a3", "numa": "GPU-a2"},
    ]


def test_a_bridge_between_pairs_makes_them_closer_than_their_neighbours() -> None:
    found = places(Driver(between(4, BRIDGE, g01=LINK, g23=LINK)))
    assert [place["nvlink"] for place in found] == ["GPU-a0", "GPU-a0", "GPU-a2", "GPU-a2"]
    assert {place["pcie"] for place in found} == {"GPU-a0"}


def test_what_is_not_told_is_far_and_machines_share_nothing() -> None:
    first, second = places(Driver(between(2, None)))
    assert not set(first.values()) & set(second.values())
    (other,) = places(Driver(between(1, None), machine="b"))
    assert not set(first.values()) & set(other.values())


def test_the_closer_pair_of_gpus_is_taken_to_be_faster() -> None:
    source, *others = places(Driver(between(4, SYSTEM, g01=LINK, g02=SWITCH)))
    p = worker("p", locality=source)
    candidates = [worker("d", locality=place) for place in others]
    near, bridged, far = (transfer_time(p, d, NEED, fleet_of([], [])) for d in candidates)
    assert near < bridged < far


def test_a_gpu_tells_its_memory_work_and_power() -> None:
    assert Gpu(Driver(between(1, None)), "a0").gauges() == {
        "gpu_utilization_ratio": 0.75,
        "gpu_memory_used_bytes": GIB,
        "gpu_memory_total_bytes": 4 * GIB,
        "gpu_power_watts": 70.5,
    }


def test_a_driver_that_stops_answering_costs_the_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NoAnswer("GPU is lost")

    driver = Driver(between(1, None))
    gpu = Gpu(driver, "a0")
    monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", fail)
    monkeypatch.setattr(driver, "nvmlDeviceGetCount", fail)
    assert gpu.gauges() == {} and gpu.locality() == {}


def test_without_a_driver_there_is_one_line_and_no_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert Usage("00000000-0000-0000-0000-000000000000").locality == {}
    assert [record.message.split(":")[0] for record in caplog.records] == ["no metrics of the GPU"]
