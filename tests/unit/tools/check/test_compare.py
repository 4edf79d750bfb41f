"""The comparison of traces: the first difference, its words, and no alarm where there is none."""

from __future__ import annotations

from typing import Any

from holdfast.elastic.loop.trace.records import (
    CarriedSeen,
    ForeignUse,
    LeafDigest,
    LoopEntered,
    LoopLeft,
    MicrobatchSeen,
    StateSeen,
    Traced,
)
from holdfast.tools.check.traces import RankTrace
from holdfast.tools.check.verdict import CheckFinding, Judge


def entered(**changes: Any) -> LoopEntered:
    values: dict[str, Any] = {
        "stage": "train",
        "generation": 1,
        "rank": 0,
        "world": 1,
        "pid": 7,
        "completed": 0,
        "exact": "float32",
        "microbatches": 2,
        "share": 2,
    }
    return LoopEntered(**{**values, **changes})


def microbatch(step: int, number: int, **changes: Any) -> MicrobatchSeen:
    values: dict[str, Any] = {
        "step": step,
        "phase": 0,
        "round": 0,
        "microbatch": number,
        "input": f"input {step} {number}",
        "draws": {"torch": "t", "NumPy": "n", "Python": "p"},
        "line": "train.py:30",
        "loss": f"loss {step} {number}",
        "value": 1.0,
        "gradients": {"net.weight": f"gradient {step} {number}"},
    }
    return MicrobatchSeen(**{**values, **changes})


def weights(step: int, *, digest: str = "", norm: float = 1.0) -> StateSeen:
    leaf = LeafDigest(kind="parameter", digest=digest or f"w{step}", norm=norm, mark=norm)
    lr = LeafDigest(kind="value", digest="lr", shown="0.01")
    return StateSeen(step=step, after=True, leaves={"net.weight": leaf, "opt.lr": lr}, updates=1)


def run(*records: Traced, **changes: Any) -> RankTrace:
    return RankTrace(entered=entered(**changes), records=records)


def steps(count: int, *, first: int = 0, share: tuple[int, ...] = (0, 1)) -> list[Traced]:
    made: list[Traced] = []
    for step in range(first, count):
        made += [*(microbatch(step, number) for number in share), weights(step)]
    return [*made, LoopLeft(step=count, how="end")]


def use(kind: Any, **changes: Any) -> ForeignUse:
    values: dict[str, Any] = {
        "use": kind,
        "line": "train.py:41",
        "detail": "",
        "place": "microbatch",
        "step": 0,
    }
    return ForeignUse(**{**values, **changes})


def judged(
    *traces: RankTrace, where: str = "with two ranks", **changes: Any
) -> CheckFinding | None:
    judge = Judge([run(*steps(3), **changes)])
    return judge.judge(list(traces), name="ranks", where=where)


def test_the_rank_that_ran_a_microbatch_does_not_matter() -> None:
    first, second = steps(3, share=(0,)), steps(3, share=(1,))
    assert judged(run(*first, world=2), run(*second, world=2, rank=1)) is None


def test_the_first_difference_is_named_and_not_its_consequences() -> None:
    records = steps(3)
    records[3] = microbatch(1, 0, input="another", loss="another")
    records[6:] = [microbatch(2, 0, loss="another"), *records[7:]]
    found = judged(run(*records))
    assert found is not None
    assert (found.step, found.microbatch, found.what) == (1, 0, "input")
    assert found.text.startswith("step 1, microbatch 0: other input with two ranks; the data set")


def test_a_loader_that_is_not_the_runs_is_the_cause_of_another_loss() -> None:
    records = [use("loader", detail="train.py:40", place="step"), *steps(3)]
    records[1] = microbatch(0, 0, loss="another", value=2.0)
    found = judged(run(*records))
    assert found is not None
    assert found.text == (
        "step 0, microbatch 0: other input with two ranks; the DataLoader made at train.py:40 and "
        "iterated at train.py:41 is not the run's"
    )
    assert "run.loader" in found.remedy


def test_a_generator_that_is_not_the_runs_is_the_cause_of_other_noise() -> None:
    records = [use("generator", detail="randn"), *steps(3)]
    records[1] = microbatch(0, 0, loss="another", value=2.0)
    found = judged(run(*records))
    assert found is not None
    assert found.text == (
        "step 0, microbatch 0: other noise with two ranks; a generator that is not the run's is "
        "used at train.py:41"
    )


def test_a_plain_value_of_the_state_shows_both_values() -> None:
    records = steps(3)
    leaves = {"opt.lr": LeafDigest(kind="value", digest="other", shown="0.02")}
    records[2] = StateSeen(step=0, after=True, leaves=leaves)
    found = judged(run(*records))
    assert found is not None
    assert found.text == "step 0, with two ranks: `opt.lr` is 0.02 where it was 0.01"


def test_a_pass_that_was_computed_again_counts_once() -> None:
    again = [microbatch(0, 0, gradients={"net.weight": "of a coarser grid"}), *steps(3)]
    assert judged(run(*again)) is None


def test_a_difference_after_a_restore_says_so() -> None:
    records = steps(3, first=1)
    records[0] = microbatch(1, 0, input="another")
    found = judged(run(*records, generation=2, completed=1), where="after a kill")
    assert found is not None
    assert "other input after the restore" in found.text


def test_a_rank_that_left_alone_is_named() -> None:
    one = [CarriedSeen(step=0, values={}), *steps(1)]
    other = [CarriedSeen(step=step, values={}) for step in range(2)]
    found = judged(run(*one, world=2), run(*other, world=2, rank=1))
    assert found is not None
    assert found.text == "rank 0 left the loop at step 1, rank 1 did not"


def test_ranks_that_leave_together_are_not_named() -> None:
    one, other = steps(2, share=(0,)), steps(2, share=(1,))
    judge = Judge([run(*steps(2))])
    assert judge.judge([run(*one), run(*other, rank=1)], name="", where="") is None


def test_leaving_at_another_step_than_alone_is_a_difference() -> None:
    found = judged(run(*steps(2)))
    assert found is not None
    assert found.text == ("with two ranks the loop was left at step 2, not at step 3")


class TestCarriedVariables:
    @staticmethod
    def carried(*values: Any, name: str = "best") -> list[Traced]:
        return [CarriedSeen(step=step, values={name: str(v)}) for step, v in enumerate(values)]

    def lost(self, here: str, *, expected: tuple[float, ...] = (9.0, 0.8)) -> CheckFinding | None:
        judge = Judge([run(*self.carried(*expected), *steps(2))])
        again = [CarriedSeen(step=1, values={"best": here}), *steps(2, first=1)]
        trace = run(*again, generation=2, completed=1)
        return judge.judge([trace], name="kills", where="after a kill")

    def test_one_that_a_restore_loses_is_named_with_both_values(self) -> None:
        found = self.lost("9.0")
        assert found is not None
        assert found.text == "step 1, after the restore: `best` is 9.0 where it was 0.8"
        assert "run.track" in found.remedy

    def test_one_that_never_changes_is_not(self) -> None:
        assert self.lost("7.0", expected=(9.0, 9.0)) is None

    def test_one_that_ranks_do_not_share_is_not(self) -> None:
        judge = Judge([run(*self.carried(9.0, 0.8), *steps(2))])
        two = run(*self.carried(9.0, 0.5), *steps(2), world=2)
        again = run(*[CarriedSeen(step=1, values={"best": "9.0"})], generation=2, completed=1)
        assert judge.judge([two, again], name="", where="") is None


class TestWithoutExact:
    def test_rounding_is_no_difference(self) -> None:
        records = steps(3)
        records[0] = microbatch(
            0, 0, loss="another", value=1.0 + 1e-6, gradients={"net.weight": ""}
        )
        records[2] = weights(0, digest="another", norm=1.0 + 1e-6)
        assert judged(run(*records), exact=None) is None

    def test_another_loss_is(self) -> None:
        records = steps(3)
        records[0] = microbatch(0, 0, loss="another", value=1.1)
        found = judged(run(*records), exact=None)
        assert found is not None
        assert "the loss is 1.1 where it was 1" in found.text

    def test_other_weights_are(self) -> None:
        records = steps(3)
        records[2] = weights(0, digest="another", norm=1.02)
        found = judged(run(*records), exact=None)
        assert found is not None
        assert found.names == ("net.weight",)

    def test_other_draws_are(self) -> None:
        records = steps(3)
        records[0] = microbatch(0, 0, draws={"torch": "other", "NumPy": "n", "Python": "p"})
        found = judged(run(*records), exact=None)
        assert found is not None
        assert "other draws from torch's generator" in found.text


def test_a_gradient_that_is_dropped_in_a_pass_is_a_misuse_by_itself() -> None:
    judge = Judge(
        [run(use("zero_grad", detail="of `w` vanished after microbatch 1", step=2), *steps(3))]
    )
    found = judge.misuse()
    assert found is not None
    assert found.text == (
        "step 2: gradients of `w` vanished after microbatch 1 (`zero_grad` at train.py:41)"
    )
    assert "run.step" in found.remedy


class TestStateOfOneRank:
    @staticmethod
    def own(step: int, value: int, *, after: bool = True) -> StateSeen:
        leaf = LeafDigest(kind="own", digest=str(value), shown=str(value))
        return StateSeen(step=step, after=after, leaves={"game@1.turns": leaf}, updates=1)

    def found(self, here: int, **second: Any) -> CheckFinding | None:
        judge = Judge([run(*steps(2))])
        first = run(self.own(0, 1), self.own(1, 2), self.own(2, 3), world=2, rank=1)
        changes: dict[str, Any] = {"world": 2, "rank": 1, "generation": 2, "completed": 2}
        again = run(self.own(2, here, after=False), **{**changes, **second})
        return judge.judge([first, again], name="kills", where="killed")

    def test_a_value_that_a_restore_does_not_bring_back_is_named(self) -> None:
        found = self.found(0)
        assert found is not None
        assert found.text == "step 2, after the restore: `game@1.turns` is 0 where it was 2"
        assert "load_state_dict" in found.remedy

    def test_one_that_it_brings_back_is_not(self) -> None:
        assert self.found(2) is None

    def test_nor_one_of_another_rank_or_world(self) -> None:
        assert self.found(0, rank=0) is None
        assert self.found(0, world=3) is None

    def test_other_values_in_other_runs_are_no_difference(self) -> None:
        judge = Judge([run(self.own(0, 5), *steps(2))])
        assert judge.judge([run(self.own(0, 6), *steps(2))], name="again", where="") is None

    def test_without_exact_only_runs_with_as_many_ranks_are_compared(self) -> None:
        judge = Judge([run(*steps(2), per_rank=True, exact=None)])
        other = [microbatch(0, 0, loss="another", value=2.0), *steps(2)[1:]]
        assert judge.judge([run(*other, world=2)], name="ranks", where="") is None
        found = judge.judge([run(*steps(2), world=2)], name="kills", where="killed")
        assert found is not None
        assert "the loss is 1 where it was 2" in found.text

    def test_and_only_as_long_as_their_number_has_not_changed(self) -> None:
        judge = Judge([run(*steps(2), per_rank=True, exact=None)])
        fewer = run(*steps(1), world=2)
        other = [microbatch(1, 0, loss="another", value=2.0), *steps(2, first=1)[1:]]
        later = run(*other, generation=2, completed=1)
        assert judge.judge([fewer, later], name="kills", where="killed") is None
