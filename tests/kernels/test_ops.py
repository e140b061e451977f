"""Every module of kernels offers what ``Ops`` says, by the same names and with the same arguments."""

import importlib
import inspect

import pytest
import torch

from kernels import Ops, cpu, native, select, triton

IMPLEMENTATIONS = ["kernels.cpu", "kernels.native", "kernels.triton"]
OPERATIONS = [
    name for name, member in vars(Ops).items() if inspect.isfunction(member) and not name.startswith("_")
]


def parameters(function: object) -> list[tuple[str, object]]:
    assert callable(function)
    return [
        (name, parameter.annotation) for name, parameter in inspect.signature(function).parameters.items()
    ]


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_module_has_each_operation_with_its_arguments(module: str, operation: str) -> None:
    expected = parameters(getattr(Ops, operation))[1:]  # self
    found = parameters(getattr(importlib.import_module(module), operation))
    assert found[: len(expected)] == expected
    assert all(name == "kind" for name, _ in found[len(expected) :]), (
        "what Ops does not name must be optional"
    )


def test_the_list_of_operations_is_not_empty() -> None:
    assert {"linear", "paged_attention", "store_kv"} <= set(OPERATIONS)


def test_cpus_get_kernels_with_every_operation() -> None:
    ops: Ops = select(torch.device("cpu"))
    assert all(callable(getattr(ops, operation)) for operation in OPERATIONS)


def test_gpus_get_kernels_with_every_operation() -> None:
    ops: Ops = select(torch.device("cuda:1"))
    assert ops is triton
    assert all(callable(getattr(ops, operation)) for operation in OPERATIONS)


def test_the_specification_is_an_implementation() -> None:
    ops: Ops = cpu  # the type checker compares every signature
    assert ops.silu_mul(torch.tensor([[0.0, 3.0]])).tolist() == [[0.0]]


def test_every_implementation_has_the_types_of_the_protocol() -> None:
    implementations: list[Ops] = [cpu, native, triton]  # the type checker compares every signature
    assert {select(torch.device("cpu"), name=name) for name in ("torch", "triton")} <= set(implementations)


def test_kernels_that_are_not_to_be_had_are_refused_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(
        ValueError, match="triton kernels are not to be had on cpu: Triton kernels need a GPU"
    ):
        select(torch.device("cpu"), name="triton")
    with pytest.raises(ValueError, match="native kernels are not to be had on meta: they are for CPUs"):
        select(torch.device("meta"), name="native")


def test_without_its_kernels_a_device_computes_with_pytorch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", False)
    assert select(torch.device("meta")) is cpu
    assert "kernels: PyTorch, since triton kernels are not to be had" in caplog.text
