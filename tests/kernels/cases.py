"""Tests of kernels with random shapes."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

MANY = 500
Check = Callable[..., None]


def sampled(few: int, **cases: SearchStrategy[Any]) -> Callable[[Check], Check]:
    """Makes of a check a test that calls it with arguments from ``cases``: ``few`` times, always with the
    same ones, and with the marker ``slow`` 500 times with new ones."""
    numbers = [
        pytest.param(few, id="few"),
        pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ]

    def decorate(check: Check) -> Check:
        @pytest.mark.parametrize("number", numbers)
        def test(number: int) -> None:
            settings(max_examples=number, deadline=None, derandomize=number == few)(given(**cases)(check))()

        test.__doc__, test.__module__ = check.__doc__, check.__module__
        return test

    return decorate
