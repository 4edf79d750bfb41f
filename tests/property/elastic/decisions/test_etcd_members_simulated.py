"""Machines that die and come in any order leave the etcd a majority, and an odd number at rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.decisions.etcd_members import (
    PATIENCE_S,
    AddLearner,
    KeepMembers,
    MemberChange,
    MemberPlace,
    MemberState,
    PromoteLearner,
    RemoveMember,
    next_change,
    wanted_voters,
)

STEP_S = 10.0
STEPS = 40
"""Turns after which nothing may change any more."""

MACHINES = st.integers(1, 8)
STROKES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["die", "return", "return empty", "leave", "come"]), MACHINES),
        st.tuples(st.just("turns"), st.integers(1, 9)),
    ),
    max_size=40,
)


@dataclass
class Known:
    """A member that the cluster lists."""

    machine: int
    learner: bool = True
    silent_s: float = 1.0


@dataclass
class World:
    """A cluster, and the machines on which its members run."""

    up: set[int] = field(default_factory=lambda: {1})
    leaving: set[int] = field(default_factory=set)
    members: dict[int, Known] = field(default_factory=dict)
    data: dict[int, int] = field(default_factory=dict)
    """The member of which a machine has the data."""

    last: int = 1

    def __post_init__(self) -> None:
        self.members[1] = Known(1, learner=False, silent_s=0.0)
        self.data[1] = 1

    def answers(self, id: int) -> bool:
        machine = self.members[id].machine
        return machine in self.up and self.data.get(machine) == id

    def decides(self, *, without: int = 0) -> bool:
        voters = [id for id, each in self.members.items() if not each.learner]
        up = [id for id in voters if self.answers(id) and self.members[id].machine != without]
        return 2 * len(up) > len(voters)

    def stroke(self, kind: str, machine: int) -> None:
        match kind:
            case "turns":
                for _ in range(machine):
                    self.turn()
            case "die" if self.decides(without=machine):
                self.up.discard(machine)
                self.leaving.discard(machine)
            case "return" | "come":
                self.up.add(machine)
            case "return empty" if machine not in self.up:
                self.data.pop(machine, None)
                self.up.add(machine)
            case "leave" if machine in self.up:
                self.leaving.add(machine)

    def turn(self) -> MemberChange:
        """Let time pass, then do what is decided."""
        for id, each in self.members.items():
            if each.learner and each.machine in self.up and each.machine not in self.data:
                self.data[each.machine] = id  # its launcher starts it
            each.silent_s = 0.0 if self.answers(id) else each.silent_s + STEP_S
        for machine, id in [*self.data.items()]:
            if machine in self.up and id not in self.members:
                del self.data[machine]  # its launcher finds it removed
        states = [
            MemberState(
                id=id, machine=f"m{each.machine}", learner=each.learner, silent_s=each.silent_s
            )
            for id, each in self.members.items()
        ]
        places = [MemberPlace(machine=f"m{each}", leaving=each in self.leaving) for each in self.up]
        change, reason = next_change(states, places)
        assert reason
        self.do(change)
        assert self.decides(), (change, self)
        return change

    def do(self, change: MemberChange) -> None:
        match change:
            case AddLearner(machine=name):
                machine = int(name[1:])
                assert not any(each.learner for each in self.members.values()), "one at a time"
                assert machine in self.up - self.leaving
                assert machine not in {each.machine for each in self.members.values()}
                self.last += 1
                self.members[self.last] = Known(machine)
            case PromoteLearner(id=id):
                assert self.answers(id)
                self.members[id].learner = False
                assert len(self.voters()) <= 5
            case RemoveMember(id=id):
                gone = self.members.pop(id)
                leaves = gone.machine in self.leaving
                kept = [each for each in self.members.values() if not each.learner]
                assert gone.learner or leaves or gone.silent_s >= PATIENCE_S or len(kept) % 2

    def voters(self) -> list[Known]:
        return [each for each in self.members.values() if not each.learner]


@given(strokes=STROKES)
@settings(max_examples=examples(150), deadline=None)
def test_no_minority_of_deaths_stops_it_and_it_comes_to_rest(
    strokes: list[tuple[str, int]],
) -> None:
    world = World()
    for kind, number in strokes:
        world.stroke(kind, number)
    changes = [world.turn() for _ in range(STEPS)]
    assert changes[-1] == KeepMembers(), changes
    staying = world.up - world.leaving
    voters = world.voters()
    assert not [each for each in world.members.values() if each.learner]
    assert len({each.machine for each in voters}) == len(voters) <= 5
    answering = sum(id in world.members and world.answers(id) for id in world.members)
    if staying:
        assert len(voters) % 2 == 1
        assert len(voters) - answering <= 1, "of five, another may be lost after two are gone"
        assert answering >= min(wanted_voters(len(staying)), len(voters) // 2 + 1)
        assert not {each.machine for each in voters} & world.leaving
        assert len(voters) >= wanted_voters(len(staying))


@given(
    members=st.lists(
        st.builds(
            MemberState,
            id=st.integers(1, 9),
            machine=st.sampled_from([f"m{i}" for i in range(8)]),
            learner=st.booleans(),
            silent_s=st.sampled_from([0.0, 1.0, PATIENCE_S]),
        ),
        max_size=6,
        unique_by=lambda member: member.id,
    ),
    places=st.lists(
        st.builds(
            MemberPlace, machine=st.sampled_from([f"m{i}" for i in range(8)]), leaving=st.booleans()
        ),
        max_size=8,
    ),
)
@settings(max_examples=examples(300), deadline=None)
def test_after_any_change_a_majority_of_the_voters_answers(
    members: list[MemberState], places: list[MemberPlace]
) -> None:
    change, _ = next_change(members, places)
    voters = [member for member in members if not member.learner]
    match change:
        case PromoteLearner(id=id):
            voters += [member for member in members if member.id == id]
        case RemoveMember(id=id):
            voters = [voter for voter in voters if voter.id != id]
        case KeepMembers():
            return
    assert 2 * sum(not voter.silent_s for voter in voters) > len(voters)
