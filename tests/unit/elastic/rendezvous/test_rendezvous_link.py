"""Nodes' links to one rendezvous, over a real embedded coordinator."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import ConfigError, CoordinatorError
from holdfast.elastic.rendezvous.link import CoordinatorPlace, RendezvousLink
from holdfast.elastic.rendezvous.rounds import Participant, Round

TTL_S = 0.8


@pytest.fixture
def links() -> Iterator[Callable[[], RendezvousLink]]:
    """Make links to one place on a free port; the remaining ones end with the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key, place = RunKey.new(), CoordinatorPlace.parse(f"localhost:{port}")
    with ExitStack() as stack:

        def make() -> RendezvousLink:
            link = RendezvousLink(place, key, prefix="torchrun/test/", ttl_s=TTL_S)
            stack.callback(link.leave, farewell=False)
            return link

        yield make


def enter(link: RendezvousLink, node: str) -> RendezvousLink:
    link.enter(Participant(node=node, host=node), deadline_s=time.monotonic() + 20)
    return link


def await_nodes(link: RendezvousLink, *names: str) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        seen = link.version
        found = sorted(link.view().nodes)
        if found == sorted(names):
            return
        assert time.monotonic() < deadline_s, f"{found} instead of {names}"
        link.await_change(after=seen, timeout_s=1.0)


def test_nodes_see_each_other_and_who_leaves_is_gone_at_once(
    links: Callable[[], RendezvousLink],
) -> None:
    a, b = enter(links(), "a"), enter(links(), "b")
    await_nodes(a, "a", "b")
    b.leave(farewell=False)
    await_nodes(a, "a")


def test_a_node_outlives_its_lease_by_renewing_it(links: Callable[[], RendezvousLink]) -> None:
    a, b = enter(links(), "a"), enter(links(), "b")
    await_nodes(a, "a", "b")
    seen = a.version
    a.await_change(after=seen, timeout_s=3 * TTL_S)
    assert sorted(a.view().nodes) == ["a", "b"]
    b.leave(farewell=False)


def test_when_the_serving_node_ends_another_takes_over_with_the_newest_round(
    links: Callable[[], RendezvousLink],
) -> None:
    a, b, c = enter(links(), "a"), enter(links(), "b"), enter(links(), "c")
    await_nodes(c, "a", "b", "c")
    newest = Round(number=5, members=("a", "b"), hosts=("a", "b"), store="a:1")
    assert a.form(newest, expected=0)
    while b.view().number < 5 or c.view().number < 5:
        b.await_change(after=b.version, timeout_s=0.05)
    a.leave(farewell=False)
    await_nodes(b, "b", "c")
    await_nodes(c, "b", "c")
    assert b.view().newest == c.view().newest == newest


def test_of_two_that_form_a_round_one_wins(links: Callable[[], RendezvousLink]) -> None:
    a, b = enter(links(), "a"), enter(links(), "b")
    fresh = Round(number=1, members=("a", "b"), hosts=("a", "b"), store="a:1")
    assert a.form(fresh, expected=0)
    assert not b.form(fresh, expected=0)


def test_the_closed_mark_reaches_everybody_and_the_last_one_cleans_up(
    links: Callable[[], RendezvousLink],
) -> None:
    a, b = enter(links(), "a"), enter(links(), "b")
    await_nodes(b, "a", "b")
    b.close()
    while not a.view().closed:
        a.await_change(after=a.version, timeout_s=0.05)
    b.leave(farewell=True)
    a.leave(farewell=True)


def test_without_anybody_who_serves_it_the_error_says_what_to_check() -> None:
    link = RendezvousLink(
        CoordinatorPlace.parse("localhost:9", may_host=False), RunKey.new(), prefix="x/", ttl_s=1.0
    )
    with pytest.raises(CoordinatorError, match="same key file"):
        link.enter(Participant(node="a", host="a"), deadline_s=time.monotonic())
    link.leave(farewell=False)


@pytest.mark.parametrize("endpoint", ["host:0", "host:x", ":1", "host:99999"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        CoordinatorPlace.parse(endpoint)


def test_endpoints_have_a_default_port_and_may_be_etcds() -> None:
    assert CoordinatorPlace.parse("").address == "localhost:29400"
    assert CoordinatorPlace.parse("node7").url == "tcp://node7:29400"
    etcd = CoordinatorPlace.parse("etcd://one:2379,two:2379")
    assert (etcd.url, etcd.bind(), etcd.host) == ("etcd://one:2379,two:2379", "", "one")
