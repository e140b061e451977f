from dataclasses import replace

import pytest
import torch

from common.config import ConfigError, WorkerConfig
from common.startup import choose_device, choose_ops, choose_sampling, listening_host
from kernels import Ops, cpu, native, triton


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"--device: there is no {missing}: PyTorch sees"):
        choose_device(missing)


@pytest.mark.parametrize("name", ["meta", "mps", "toaster", "cpu:x"])
def test_devices_that_baton_cannot_compute_on_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--device: "):
        choose_device(name)


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_decode_worker_tells_an_address_that_is_one(host: str) -> None:
    anywhere = WorkerConfig(bind_host=host)
    with pytest.raises(ConfigError, match=r"--bind-host .* needs --advertise-host"):
        listening_host("decode", anywhere)
    assert listening_host("decode", replace(anywhere, advertise_host="here")) == host
    assert listening_host("decode", WorkerConfig(bind_host="10.0.0.1")) == "10.0.0.1"
    assert listening_host("prefill", anywhere) == "127.0.0.1", "it listens nowhere"


def test_kernels_that_are_not_to_be_had_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--kernels: native kernels are not to be had on meta"):
        choose_ops("native", torch.device("meta"), 1)


@pytest.mark.parametrize("ops", [cpu, native, triton])
def test_tokens_are_drawn_and_logits_penalized_where_they_are_computed(ops: Ops) -> None:
    if ops is native and native.available() is not None:
        pytest.skip("no kernels in C here")
    sampling = choose_sampling(ops)
    rows = torch.tensor([[0.0, 9.0, 1.0], [7.0, 0.0, -1.0]])
    assert sampling.draw(list(rows), [(1.0, 0.0, 1, 1.0, 0.5)] * 2) == [1, 0]
    one = torch.ones(2)
    sampling.penalize(
        rows, torch.tensor([1]), torch.tensor([0]).int(), torch.tensor([True]), 3 * one, one, one
    )
    assert rows.tolist() == [[0.0, 1.0, 1.0], [7.0, 0.0, -1.0]]
