"""A guarded call releases its waiter for any error of the waiting thread."""

import threading

import pytest

from holdfast.elastic.errors import GenerationOverError, RollBackError
from holdfast.elastic.groups.waits import WaitGuard

DEADLINE_S = 5.0


def outcome_of(raised: BaseException) -> BaseException | None:
    """Return what a guarded call that raises hands to its waiter; None where it waits for ever."""
    found: list[BaseException] = []

    def blocking() -> None:
        raise raised

    def wait() -> None:
        try:
            WaitGuard(1, lambda: False, grace_s=0.01).call(blocking, name="form-group")
        except BaseException as error:  # noqa: BLE001 - is what the test looks at
            found.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(DEADLINE_S)
    return found[0] if found else None


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit("gone")])
def test_a_waiter_is_released_by_what_is_no_exception_and_told_its_name(
    raised: BaseException,
) -> None:
    error = outcome_of(raised)
    assert isinstance(error, RuntimeError)
    assert "form-group" in str(error) and repr(raised) in str(error)
    assert error.__cause__ is raised


def test_a_waiter_gets_the_exception_of_the_call_itself() -> None:
    raised = ValueError("no such peer")
    assert outcome_of(raised) is raised


GLOO = (
    "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:45745: Connection reset by peer. "
    "This is typically caused by a remote worker hanging or bugs in the application."
)


POINT = "tcp://10.0.0.2:9: the server has ended: no answer to await"


@pytest.mark.parametrize(
    "text", [GLOO, "Connection closed by peer [10.0.0.2]:9", "Broken pipe", POINT]
)
def test_an_error_of_a_connection_waits_for_a_fence_that_comes_late(text: str) -> None:
    looks = iter(range(50))
    guard = WaitGuard(1, lambda: next(looks, None) is None, grace_s=0.0, lost_peer_grace_s=60)
    with pytest.raises(GenerationOverError, match="generation 1 is over"):
        guard.reraise(RuntimeError(text))


def test_an_error_of_a_script_waits_less() -> None:
    guard = WaitGuard(1, lambda: False, grace_s=0.0, lost_peer_grace_s=60)
    error = RuntimeError("output tensor size must be equal to world_size times input tensor size")
    with pytest.raises(RuntimeError) as caught:
        guard.reraise(error)
    assert caught.value is error


def test_an_end_that_is_caught_is_raised_again() -> None:
    guard = WaitGuard(1, lambda: False)
    guard.check()
    error = RollBackError("step 3: go back", at_most=2)
    guard.end(error)
    for _ in range(2):
        with pytest.raises(RollBackError) as caught:
            guard.check()
        assert caught.value is error


def test_a_call_that_takes_longer_than_its_limit_is_left_behind() -> None:
    guard, done = WaitGuard(1, lambda: False), threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"find takes longer than 0\.05 s"):
            guard.call(done.wait, name="find", limit_s=0.05)
        assert guard.call(lambda: 7, name="find", limit_s=60.0) == 7
    finally:
        done.set()
