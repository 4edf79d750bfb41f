"""A link follows the members of an etcd whose members change."""

from __future__ import annotations

import uuid

import pytest

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.coordinator.etcd.failures import judge
from holdfast.elastic.coordinator.etcd.link import EtcdLink
from holdfast.elastic.coordinator.managed.authority import Authority
from holdfast.elastic.errors import CoordinatorError


def link(*endpoints: str, token: str = "") -> EtcdLink:
    token = token or uuid.uuid4().hex
    address = EtcdAddress.parse(f"managed://{','.join(endpoints)}/{token}")
    return EtcdLink(address, timeout_s=1.0, identity=Authority.of(RunKey.new()).client(token))


def used(each: EtcdLink) -> str:
    line = each.enter()
    line.leave()
    return line.endpoint


def test_it_stays_with_its_member_while_that_is_there() -> None:
    found = link("a:1", "b:1", "c:1")
    found.note(found.enter(), judge("UNAVAILABLE", "gone"), ())
    assert used(found) == "b:1"
    found.follow(["b:1", "d:1"])
    assert used(found) == "b:1"
    assert found.endpoints == ("b:1", "d:1")


def test_it_leaves_a_member_that_was_removed_and_ends_its_streams() -> None:
    found = link("a:1", "b:1")
    before = found.enter()
    found.follow(["b:1", "c:1"])
    assert used(found) == "b:1"
    assert not before.enter(), "the line to the member that was removed takes no request"
    found.note(before, judge("UNAVAILABLE", "gone"), ())
    assert used(found) == "b:1", "a late failure of the old member is not one of the new"


def test_an_empty_list_changes_nothing() -> None:
    found = link("a:1")
    found.follow([])
    assert found.endpoints == ("a:1",)


def test_a_closed_link_follows_nobody() -> None:
    found = link("a:1")
    found.close()
    found.follow(["b:1"])
    with pytest.raises(CoordinatorError, match="closed"):
        found.enter()


def test_all_links_of_a_cluster_know_what_one_learned() -> None:
    token = uuid.uuid4().hex
    first, other = link("a:1", token=token), link("a:1")
    idle = link("a:1", token=token)
    before = used(idle)
    first.follow(["b:1"])
    later = link("a:1", token=token)
    assert (before, used(idle), used(later)) == ("a:1", "b:1", "b:1")
    assert used(other) == "a:1", "another cluster"


def test_an_etcd_of_others_keeps_the_addresses_that_the_user_gave() -> None:
    found = EtcdLink(EtcdAddress.parse("etcd://a:1"), timeout_s=1.0)
    line = found.enter()
    found.look(line)  # asks nobody
    line.leave()
    assert found.endpoints == ("a:1",)
