"""Every module of kernels offers what ``Ops`` says, by the same names and with the same arguments."""

import importlib
import inspect

import pytest
import torch

from kernels import Ops, cpu, select

IMPLEMENTATIONS = ["kernels.cpu", "kernels.native"]
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


def test_the_specification_is_an_implementation() -> None:
    ops: Ops = cpu  # the type checker compares every signature
    assert ops.silu_mul(torch.tensor([[0.0, 3.0]])).tolist() == [[0.0]]
