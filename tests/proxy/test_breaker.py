from proxy.breaker import COOL_DOWN_S, MAX_FAILURES, Breaker


def broken(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for index in range(MAX_FAILURES):
        breaker.failed(f"request-{index}", now)
    return breaker


def test_opens_after_several_requests_have_failed_in_a_row() -> None:
    breaker = Breaker()
    for index in range(MAX_FAILURES - 1):
        breaker.failed(f"request-{index}", 0.0)
    assert breaker.allows(0.0)
    breaker.failed("last", 0.0)
    assert not breaker.allows(0.0)


def test_one_request_that_always_fails_condemns_nobody() -> None:
    breaker = Breaker()
    for _ in range(10 * MAX_FAILURES):
        breaker.failed("poison", 0.0)
    assert breaker.allows(0.0)


def test_a_success_forgets_earlier_failures() -> None:
    breaker = Breaker()
    for index in range(10 * MAX_FAILURES):
        breaker.failed(f"request-{index}", 0.0)
        breaker.succeeded()
    assert breaker.allows(0.0)


def test_after_the_cool_down_one_request_is_let_through() -> None:
    breaker = broken()
    later = COOL_DOWN_S[0]
    assert breaker.allows(later)
    breaker.dispatched("probe")
    assert not breaker.allows(later)
    breaker.succeeded()
    assert breaker.allows(later)


def test_a_failed_probe_doubles_the_cool_down_up_to_a_bound() -> None:
    breaker, now, pauses = broken(), 0.0, []
    for index in range(10):
        assert breaker.opened_until is not None
        pauses.append(breaker.opened_until - now)
        now = breaker.opened_until
        breaker.dispatched(f"probe-{index}")
        breaker.failed(f"probe-{index}", now)
        breaker.settled(f"probe-{index}")
    assert pauses[:3] == [COOL_DOWN_S[0], 2 * COOL_DOWN_S[0], 4 * COOL_DOWN_S[0]]
    assert pauses[-1] == COOL_DOWN_S[1]


def test_a_probe_that_proves_nothing_makes_room_for_another() -> None:
    breaker = broken()
    later = COOL_DOWN_S[0]
    breaker.dispatched("left early")
    breaker.settled("left early")
    assert breaker.allows(later)
