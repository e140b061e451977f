import pytest

from proxy.caller import caller_of
from proxy.errors import ApiError
from proxy.fleet import Targets

DEFAULTS = Targets(ttft_s=1.0, itl_s=0.05)


def test_headers_stand_for_what_the_configuration_promises() -> None:
    assert caller_of({}, "", DEFAULTS).targets == DEFAULTS
    headers = {"x-baton-slo-ttft": "0.25", "x-baton-slo-itl": "0"}
    caller = caller_of(headers | {"x-session-id": "s"}, "2", DEFAULTS)
    assert caller.targets == Targets(0.25, 0.0)
    assert (caller.key, caller.session) == ("2", "s")
    assert caller_of({"x-baton-slo-ttft": "5e-2"}, "", DEFAULTS).targets.ttft_s == 0.05


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "", "1_0", "0x1", "1e999", "1 0", "٣"])
def test_a_target_that_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ApiError, match="X-Baton-SLO-ITL") as refusal:
        caller_of({"x-baton-slo-itl": text}, "", DEFAULTS)
    assert refusal.value.status == 400


def test_a_session_of_absurd_length_is_refused() -> None:
    with pytest.raises(ApiError, match="X-Session-ID"):
        caller_of({"x-session-id": "x" * 1000}, "", DEFAULTS)
