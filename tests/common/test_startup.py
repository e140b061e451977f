import pytest
import torch

from common.config import ConfigError
from common.startup import choose_device


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
