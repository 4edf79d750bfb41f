"""A rendezvous of nodes through a real etcd."""

from __future__ import annotations

import time
from contextlib import ExitStack

from etcd_fixtures import Connect

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.rendezvous.link import CoordinatorPlace, RendezvousLink
from holdfast.elastic.rendezvous.rounds import Participant, Round

DEADLINE_S = 60.0


def enter(stack: ExitStack, place: str, node: str) -> RendezvousLink:
    link = RendezvousLink(
        CoordinatorPlace.parse(place), RunKey.new(), prefix="torchrun/test/", ttl_s=6.0
    )
    stack.callback(link.leave, farewell=False)
    link.enter(Participant(node=node, host=node), deadline_s=time.monotonic() + DEADLINE_S)
    return link


def await_nodes(link: RendezvousLink, *names: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while sorted(link.view().nodes) != sorted(names):
        assert time.monotonic() < deadline_s, f"{link.view()} instead of {names}"
        link.await_change(after=link.version, timeout_s=0.1)


def test_nodes_meet_form_one_round_and_leave_nothing(
    etcd_place: str, connect_etcd: Connect
) -> None:
    with ExitStack() as stack:
        a, b = enter(stack, etcd_place, "a"), enter(stack, etcd_place, "b")
        await_nodes(a, "a", "b")
        await_nodes(b, "a", "b")
        fresh = Round(number=1, members=("a", "b"), hosts=("a", "b"), store="a:1")
        assert a.form(fresh, expected=0)
        assert not b.form(fresh, expected=0)
        a.say(Participant(node="a", host="a", waits_after=None))
        while b.view().newest != fresh or b.view().nodes["a"].waits_after is not None:
            b.await_change(after=b.version, timeout_s=0.1)
        a.leave(farewell=False)
        await_nodes(b, "b")
        b.close()
        b.leave(farewell=True)
        left, _ = connect_etcd(etcd_place).range("torchrun/test/")
        assert [entry.key for entry in left] == ["torchrun/test/closed"]  # it goes by its lease
