from typing import Any

import pytest

from common.messages import FinishReason
from common.stopping import finish_reason
from tests.common.toy import EOS, make_sequence


def reason(output: list[int], limit: int = 100, **sampling: Any) -> FinishReason | None:
    parameters = {"max_tokens": 10, "ignore_eos": False} | sampling
    sequence = make_sequence("r", [1, 2, *output], num_prompt_tokens=2, **parameters)
    return finish_reason(sequence, [EOS], limit)


@pytest.mark.parametrize(
    ("output", "sampling", "expected"),
    [
        ([3], {}, None),
        ([EOS], {}, "stop"),
        ([EOS], {"ignore_eos": True}, None),
        ([EOS, 3], {}, None),
        ([7], {"stop_token_ids": (7,)}, "stop"),
        ([7], {"stop_token_ids": (7,), "ignore_eos": True}, "stop"),
        ([7], {"stop_token_ids": (7,), "min_tokens": 2}, None),
        ([EOS], {"min_tokens": 2}, None),
        ([3, EOS], {"min_tokens": 2}, "stop"),
        ([3], {"max_tokens": 1}, "length"),
        ([EOS], {"max_tokens": 1}, "stop"),
        ([3, 4], {"max_tokens": 3}, None),
        ([3, 4], {"limit": 4}, "length"),
        ([3, 4], {"limit": 5}, None),
    ],
)
def test_ends_for_the_right_reason(output: list[int], sampling: dict[str, Any], expected: str | None) -> None:
    assert reason(output, **sampling) == expected
