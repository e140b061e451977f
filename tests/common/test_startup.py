import pytest
import torch

from common import sampler
from common.config import ConfigError
from common.startup import choose_device, choose_draw, choose_ops
from kernels import cpu, native, triton


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


def test_kernels_that_are_not_to_be_had_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--kernels: native kernels are not to be had on meta"):
        choose_ops("native", torch.device("meta"), 1)


def test_tokens_are_drawn_by_the_kernels_that_compute() -> None:
    assert choose_draw(cpu) is sampler.draw
    assert choose_draw(native) is native.draw
    assert choose_draw(triton) is triton.draw
