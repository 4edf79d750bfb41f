"""Parity groups: balanced over the domains, stable, and with a correct survival statement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from doubles.blocks import make_world
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.parity.groups import Groups, form_groups
from holdfast.ckpt.parity.stripes import Geometry


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, str]:
    count = draw(st.integers(2, 40))
    racks = draw(st.integers(1, 8))
    labels = st.sampled_from(["", *(f"rack{i}" for i in range(racks))])
    return {f"n{i:02}": draw(labels) for i in range(count)}


@st.composite
def nested(draw: st.DrawFn) -> dict[str, str]:
    """Nodes in racks, racks in halls; some without a rack, some alone."""
    halls = draw(st.integers(1, 5))
    labels = ["", *(f"hall{hall}" for hall in range(halls))]
    labels += [f"hall{hall}/rack{rack}" for hall in range(halls) for rack in range(3)]
    count = draw(st.integers(2, 40))
    return {f"n{i:02}": draw(st.sampled_from(labels)) for i in range(count)}


parities = st.integers(1, 3)
sizes = st.integers(2, 12)


def domain_of(node: str, domains: Mapping[str, str]) -> str:
    return domains[node] or node


def labels_of(node: str, domains: Mapping[str, str]) -> tuple[str, ...]:
    """Return the domain of a node and all that contain it."""
    parts = domains[node].split("/") if domains[node] else [node]
    return tuple("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))


@settings(max_examples=examples(150), deadline=None)
@given(clusters(), parities, sizes, st.randoms(use_true_random=False))
def test_groups_partition_the_nodes_evenly_in_size_and_in_domains(
    domains: dict[str, str], parity: int, size: int, rng: object
) -> None:
    parity = min(parity, len(domains) - 1)
    groups, _ = form_groups(domains, parity=parity, size=size)
    assert sorted(node for group in groups for node in group) == sorted(domains)
    lengths = [len(group) for group in groups]
    assert min(lengths) > parity
    assert max(lengths) - min(lengths) <= 1
    totals = Counter(domain_of(node, domains) for node in domains)
    for group in groups:
        for label, count in Counter(domain_of(node, domains) for node in group).items():
            assert count <= -(-totals[label] // len(groups))
    names = list(domains)
    rng.shuffle(names)  # type: ignore[attr-defined]
    again, _ = form_groups({name: domains[name] for name in names}, parity=parity, size=size)
    assert again == groups


@settings(max_examples=examples(150), deadline=None)
@given(nested(), parities, sizes)
def test_domains_in_domains_are_spread_as_evenly_as_alone(
    domains: dict[str, str], parity: int, size: int
) -> None:
    parity = min(parity, len(domains) - 1)
    groups, _ = form_groups(domains, parity=parity, size=size)
    totals = Counter(label for node in domains for label in labels_of(node, domains))
    for group in groups:
        held = Counter(label for node in group for label in labels_of(node, domains))
        for label, count in held.items():
            assert count <= -(-totals[label] // len(groups))


@settings(max_examples=examples(100), deadline=None)
@given(nested(), parities, sizes, st.data())
def test_a_wide_domain_that_need_not_cost_too_much_does_not_after_any_changes(
    domains: dict[str, str], parity: int, size: int, data: st.DataObject
) -> None:
    parity = min(parity, len(domains) - 1)
    groups: Groups = ()
    for number in range(5):
        groups, _ = form_groups(domains, parity=parity, size=size, previous=groups)
        totals = Counter(label for node in domains for label in labels_of(node, domains))
        for group in groups:
            held = Counter(label for node in group for label in labels_of(node, domains))
            assert all(
                count <= parity or totals[label] > parity * len(groups)
                for label, count in held.items()
            )
        domains = dict(domains)
        if len(domains) > parity + 1 and data.draw(st.booleans()):
            del domains[data.draw(st.sampled_from(sorted(domains)))]
        else:
            domains[f"new{number}"] = data.draw(st.sampled_from(["", "hall0", "hall0/rack0"]))


@settings(max_examples=examples(150), deadline=None)
@given(st.one_of(clusters(), nested()), parities, sizes, st.integers(0, 2))
def test_what_is_said_to_survive_does(
    domains: dict[str, str], parity: int, size: int, columns: int
) -> None:
    parity = min(parity, len(domains) - 1)
    columns = min(columns, len(domains) - parity)
    groups, reason = form_groups(domains, parity=parity, size=size, columns=columns)
    losses = [
        {node for node in domains if label in labels_of(node, domains)}
        for label in {label for node in domains for label in labels_of(node, domains)}
    ]
    survived = all(fragments_lost(domains, groups, parity, columns, lost) for lost in losses)
    if max(len(lost) for lost in losses) == 1:
        assert survived
        assert "domain" not in reason
    else:
        assert survived == ("losing a whole domain is survived" in reason)
        assert survived != ("is not survived" in reason)
    if "a domain without others in it is survived" in reason:
        narrow = {domain_of(node, domains) for node in domains}
        for label in narrow:
            lost = {node for node in domains if label in labels_of(node, domains)}
            assert fragments_lost(domains, groups, parity, columns, lost)


def fragments_lost(
    domains: Mapping[str, str], groups: Groups, parity: int, columns: int, lost: set[str]
) -> bool:
    """Say whether no stripe loses more fragments than it has parity."""
    world = make_world(
        dict.fromkeys(domains, "tcp://x"), parity=parity, groups=groups, columns=columns
    )
    entries = {
        rank: BlockEntry(
            generation=1, step=1, rank=rank, payload_bytes=8, index_bytes=0, index_crc32c=0
        )
        for rank in range(len(domains))
    }
    geometry = Geometry(world, entries)
    return all(
        sum(geometry.nodes[geometry.node_of(stripe, number)] in lost for number in range(count))
        <= parity
        for stripe in range(geometry.n)
        for count in [geometry.columns(stripe) + parity]
    )


@settings(max_examples=examples(150), deadline=None)
@given(clusters(), parities, sizes, st.data())
def test_a_node_that_joins_or_leaves_moves_few_others(
    domains: dict[str, str], parity: int, size: int, data: st.DataObject
) -> None:
    parity = min(parity, len(domains) - 1)
    before, was = form_groups(domains, parity=parity, size=size)
    changed = dict(domains)
    if len(domains) - 1 > parity and data.draw(st.booleans()):
        del changed[data.draw(st.sampled_from(sorted(domains)))]
    else:
        changed["new"] = data.draw(st.sampled_from(["", "rack0", "rack9"]))
    after, now = form_groups(changed, parity=parity, size=size, previous=before)
    same, _ = form_groups(changed, parity=parity, size=size, previous=after)
    assert same == after
    if abs(len(before) - len(after)) > 1:  # only as whole domains can now be survived, or not
        assert "losing a whole domain is survived" in was + now
        return
    kept = sum(max(len(set(old) & set(new)) for new in after) for old in before)
    stayed = len(set(domains) & set(changed))
    # one group may be taken apart or made anew; a few nodes then change places
    assert stayed - kept <= 2 * max(len(group) for group in (*before, *after))
    if len(before) == len(after) and all(not label for label in changed.values()):
        assert stayed - kept <= 1


def test_the_sentence_names_the_domain_and_the_remedy() -> None:
    racks = {f"n{i:02}": f"rack{i % 4}" for i in range(16)}
    assert form_groups(racks, parity=1)[1] == (
        "4 parity groups of 4 nodes, any 1 of each may be lost; losing a whole domain is survived"
    )
    halls = {f"n{i:02}": f"hall{i % 2}" for i in range(16)}
    assert form_groups(halls, parity=1)[1] == (
        "2 parity groups of 8 nodes, any 1 of each may be lost; domain hall0 holds 4, domain hall1 "
        "holds 4 nodes of one group: losing it whole is not survived (groups of 2 would)"
    )
    assert form_groups(halls, parity=1, size=2)[1].endswith("losing a whole domain is survived")
    copies = form_groups(halls, parity=1, columns=1)[1]
    assert copies.endswith("losing a whole domain is survived")
    one = form_groups(dict.fromkeys("abc", "x"), parity=2)[1]
    assert one == (
        "1 parity group of 3 nodes, any 2 may be lost; domain x holds 3 nodes of one group: losing "
        "it whole is not survived"
    )
    assert form_groups({"a": "a"}, parity=0)[1].startswith("no parity")
    inside = {f"n{i:02}": f"hall{i % 2}/rack{i % 8}" for i in range(32)}
    assert form_groups(inside, parity=1)[1] == (
        "4 parity groups of 8 nodes, any 1 of each may be lost; losing a domain without others in "
        "it is survived; domain hall0 holds 4, domain hall1 holds 4 nodes of one group: losing it "
        "whole is not survived (groups of 2 would)"
    )


def test_ten_thousand_nodes_are_grouped_at_once() -> None:
    domains = {f"n{i:05}": f"row{i // 800}/rack{i // 40}" for i in range(10_000)}
    groups, reason = form_groups(domains, parity=2)
    assert len(groups) == 1250
    assert reason.endswith("losing a whole domain is survived")
    del domains["n00077"]
    after, _ = form_groups(domains, parity=2, previous=groups)
    assert len(set(groups) - set(after)) == 1


@pytest.mark.parametrize(("nodes", "parity", "columns"), [(1, 1, 0), (2, 2, 0), (3, 1, 3)])
def test_too_few_nodes_are_refused(nodes: int, parity: int, columns: int) -> None:
    domains = {f"n{i}": "" for i in range(nodes)}
    with pytest.raises(
        ValueError, match=rf"parity {parity} needs . nodes in a group, there are {nodes}"
    ):
        form_groups(domains, parity=parity, columns=columns)
