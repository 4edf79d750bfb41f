"""A guarded call releases its waiter for any error of the waiting thread."""

import threading
import time

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


def test_a_broken_connection_is_explained_by_a_fence_that_comes_within_the_lease() -> None:
    looked: list[float] = []

    def fenced() -> bool:
        looked.append(time.monotonic())
        return looked[-1] - looked[0] > 0.1

    guard = WaitGuard(1, fenced, grace_s=0.01, lease_s=60.0)
    with pytest.raises(GenerationOverError, match="connection reset"):
        guard.reraise(RuntimeError("connection reset"))
    unfenced = WaitGuard(1, lambda: False, grace_s=0.01)
    with pytest.raises(RuntimeError, match="connection reset"):
        unfenced.reraise(RuntimeError("connection reset"))


def test_an_end_that_is_caught_is_raised_again() -> None:
    guard = WaitGuard(1, lambda: False)
    guard.check()
    error = RollBackError("step 3: go back", at_most=2)
    guard.end(error)
    for _ in range(2):
        with pytest.raises(RollBackError) as caught:
            guard.check()
        assert caught.value is error
