"""Work of several threads comes out in order, and little of it is done ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.ckpt.store.parallel import parallel


def test_results_come_in_order_and_few_items_are_taken_ahead() -> None:
    taken, threads, lock = [0], set(), threading.Lock()

    def items() -> Iterator[int]:
        for number in range(100):
            taken[0] += 1
            yield number

    def work(number: int) -> int:
        with lock:
            threads.add(threading.get_ident())
        return number * number

    for number, result in enumerate(parallel(work, items(), threads=3)):
        assert result == number * number
        assert taken[0] <= number + 8
    assert len(threads) <= 3


def test_a_failure_comes_out_after_what_was_before_it() -> None:
    def work(number: int) -> int:
        return 10 // (3 - number)

    results = parallel(work, range(6), threads=2)
    assert [next(results) for _ in range(3)] == [3, 5, 10]
    with pytest.raises(ZeroDivisionError):
        next(results)
