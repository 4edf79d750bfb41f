"""Parity groups of nodes over labelled failure domains. Pure.

Many small groups, not one large one: a snapshot is lost as soon as one group loses more nodes than
it has parity. With ``n`` nodes in groups of ``g``, far fewer sets of nodes cost data when lost than
with fragments strewn over all ``n`` (Cidon et al., "Copysets: Reducing the Frequency of Data Loss
in Cloud Storage", USENIX ATC 2013). A rebuild also reads from ``g`` nodes instead of ``n``. The
price is memory: a group of ``g`` spends ``m / (g - m)`` of its state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from holdfast.ckpt.parity.domains import domains_of

Groups: TypeAlias = tuple[tuple[str, ...], ...]
_Paths: TypeAlias = Mapping[str, tuple[str, ...]]
"""The failure domains of each node, widest first."""

GROUP_SIZE = 8
"""The preferred size; with parity 1 such a group spends a seventh of the state."""

_NAMED_DOMAINS = 3
_PLACED_SHARE, _PLACED_MOST = 8, 64
"""Previous groups are dropped where more nodes are new: an eighth, or 64 if that is more.

To fit a node into previous groups, the search visits every group.
"""


def form_groups(
    domains: Mapping[str, str],
    *,
    parity: int,
    size: int = GROUP_SIZE,
    columns: int = 0,
    previous: Groups = (),
) -> tuple[Groups, str]:
    """Partition the nodes into parity groups; return them, and the losses they survive in words.

    ``domains`` maps nodes to the label of their failure domain, which may lie in wider ones
    (`domains_of`); an empty label is a domain of its own. ``columns`` as in `SnapshotWorld`. Every
    group has more than ``parity`` nodes (at least ``columns + parity``) and about ``size``, down to
    half of it where the loss of a whole domain then costs no group more than ``parity`` of its
    nodes. ``previous`` groups are kept as far as they stay good. Raises ``ValueError`` when the
    nodes are too few.
    """
    least = parity + max(columns, 1)
    if parity < 0 or least > max(len(domains), 1):
        raise ValueError(
            f"parity {parity} needs {least} nodes in a group, there are {len(domains)}"
        )
    paths = {node: domains_of(label) or (f"\0{node}",) for node, label in domains.items()}
    if parity == 0 or len(domains) < 2 * least:
        groups: Groups = (_spread(paths.keys(), paths),)
        return groups, _explain(groups, paths, parity=parity, columns=columns)
    count = _group_count(paths, parity, (least, max(size, least)), len(previous))
    draft = _Draft(paths, count=count, parity=parity)
    draft.keep(previous)
    draft.level()
    if draft.is_careless:
        draft = _Draft(paths, count=count, parity=parity)
        draft.keep(())
    groups = tuple(sorted([_spread(group, paths) for group in draft.groups]))
    return groups, _explain(groups, paths, parity=parity, columns=columns)


def _explain(groups: Groups, paths: _Paths, *, parity: int, columns: int) -> str:
    if parity == 0:
        return "no parity: the memory of a lost node is lost"
    text = f"{_sizes(groups)}, any {parity}{' of each' * (len(groups) > 1)} may be lost"
    totals = Counter(chain.from_iterable(paths.values()))
    if max(totals.values()) == 1:
        return text
    worst = _worst_losses(groups, paths, parity + columns if columns else 0)
    broken = {label: most for label, most in worst.items() if most > parity}
    if not broken:
        return f"{text}; losing a whole domain is survived"
    named = sorted(broken, key=lambda label: (-broken[label], label))
    parts = [f"domain {label} holds {broken[label]}" for label in named[:_NAMED_DOMAINS]]
    if len(named) > _NAMED_DOMAINS:
        parts.append(f"{len(named) - _NAMED_DOMAINS} more hold several")
    needed = max(-(-totals[label] // parity) for label in broken)
    remedy = _remedy(len(paths), groups=needed, least=parity + max(columns, 1))
    what = "nodes of one stripe" if columns else "nodes of one group"
    narrow = {path[-1] for path in paths.values()}
    if narrow.isdisjoint(broken) and any(totals[label] > 1 for label in narrow):
        text = f"{text}; losing a domain without others in it is survived"
    return f"{text}; {', '.join(parts)} {what}: losing it whole is not survived{remedy}"


def _remedy(nodes: int, *, groups: int, least: int) -> str:
    """Name the size of so many groups, which survive the loss of every domain, if it is enough."""
    size = nodes // groups
    return f" (groups of {size} would)" if size >= least else ""


def _sizes(groups: Groups) -> str:
    sizes = sorted({len(group) for group in groups})
    nodes = " to ".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{len(groups)} parity group{'s' * (len(groups) > 1)} of {nodes} nodes"


def _group_count(paths: _Paths, parity: int, sizes: tuple[int, int], before: int) -> int:
    """Return the number of groups.

    ``sizes`` are the least and the preferred size. The count ``before`` (0: none) changes only as
    far as it must, so that groups are near the preferred size, and safe where possible.
    """
    least, size = sizes
    nodes = len(paths)
    smallest = max(least, -(-size // 2))
    most = max(nodes // smallest, 1)
    nearest = max((2 * nodes + size) // (2 * size), 1)
    # with so many groups, none has more than ``parity`` nodes of a domain of that depth
    safe = [-(-largest // parity) for largest in _largest_domains(paths)]
    wanted = max((count for count in safe if count <= most), default=1)
    fewest = max(-(-nodes // (size + size // 2)), wanted)
    return min(max(before or nearest, fewest), most)


def _largest_domains(paths: _Paths) -> list[int]:
    """Return the nodes of the largest domain of each depth; a node is in one of every depth."""
    depths = max(map(len, paths.values()))
    return [
        max(Counter([path[min(depth, len(path) - 1)] for path in paths.values()]).values())
        for depth in range(depths)
    ]


class _Draft:
    """Groups under construction: ``count`` of them, whose final sizes differ by one at most."""

    def __init__(self, paths: _Paths, *, count: int, parity: int) -> None:
        self._paths, self._parity = paths, parity
        self._labels = {node: path[-1] for node, path in paths.items()}
        self._fewest, self._most = len(paths) // count, -(-len(paths) // count)
        self.groups: list[list[str]] = [[] for _ in range(count)]
        self._label_counts: list[dict[str, int]] = [{} for _ in range(count)]
        self._wide = _guarded(paths, most=parity * count)

    @property
    def is_careless(self) -> bool:
        """The loss of a wide domain costs some group too much, though it need not."""
        return bool(self._wide) and any(
            most > self._parity
            for group in self.groups
            for most in Counter(chain.from_iterable(self._wide[node] for node in group)).values()
        )

    def keep(self, previous: Groups) -> None:
        """Take over the remaining nodes of the previous groups; place the other nodes.

        If too many nodes would have to be placed, all are dealt out afresh.
        """
        left = self._left_of(previous)
        left.sort(key=lambda group: (-len(group), group))
        kept = left[: len(self.groups)]
        staying = sum(min(len(group), self._most) for group in kept)
        if len(self._labels) - staying > max(len(self._labels) // _PLACED_SHARE, _PLACED_MOST):
            kept = []
        for number, group in enumerate(kept):
            self.groups[number] = sorted(group)
            self._label_counts[number] = _counts([self._labels[node] for node in group])
            while len(self.groups[number]) > self._most:
                self._take(self._most_alike(number), number)
        placed = any(self.groups)
        rest = sorted(
            self._labels.keys() - chain.from_iterable(self.groups),
            key=lambda node: (self._paths[node], node),
        )
        for at, node in enumerate(rest):
            # dealing the nodes out domain by domain spreads each as evenly as possible, wide or not
            self._put(node, self._best_for(node) if placed else at % len(self.groups))

    def _left_of(self, previous: Groups) -> list[tuple[str, ...]]:
        """Return the previous groups without the nodes that are gone; most groups are whole."""
        labels = self._labels
        lost = set(chain.from_iterable(previous)) - labels.keys()
        if not lost:
            return list(previous)
        return [
            group if lost.isdisjoint(group) else tuple(node for node in group if node in labels)
            for group in previous
        ]

    def level(self) -> None:
        """Even out the sizes, then the share of every domain in every group."""
        while min(sizes := [len(group) for group in self.groups]) < self._fewest:
            poor, rich = sizes.index(min(sizes)), sizes.index(max(sizes))
            have = self._label_counts[poor]
            node = min(
                self.groups[rich],
                key=lambda name: (
                    self._excess(name, poor),
                    have.get(self._labels[name], 0),
                    name,
                ),
            )
            self._move(node, rich, poor)
        totals = Counter(self._labels.values())
        fair = {label: -(-total // len(self.groups)) for label, total in totals.items()}
        if not any(
            most > fair[label]
            for counts, group in zip(self._label_counts, self.groups, strict=True)
            if len(counts) < len(group)  # else no two of its nodes share a domain
            for label, most in counts.items()
        ):
            return
        where: dict[str, list[int]] = {}  # searching all groups for each domain would take long
        for number, counts in enumerate(self._label_counts):
            for label in counts:
                where.setdefault(label, []).append(number)
        for label in sorted(label for label, total in totals.items() if total > 1):
            while (over := self._over(label, fair[label], where[label])) is not None:
                for moved in (label, self._swap_out(label, over)):
                    where[moved] = [
                        i for i, counts in enumerate(self._label_counts) if moved in counts
                    ]

    def _over(self, label: str, fair: int, where: Sequence[int]) -> int | None:
        return next(
            (number for number in where if self._label_counts[number].get(label, 0) > fair), None
        )

    def _swap_out(self, label: str, over: int) -> str:
        """Exchange a node of domain ``label`` for a node of a domain that is rarer here than there.

        Returns that other domain. There always is one: group sizes differ by one at most, and the
        two groups' counts of ``label`` by two or more. The sum of squared shares falls with each
        exchange, so the exchanges end.
        """
        under = min(range(len(self.groups)), key=lambda i: (self._label_counts[i].get(label, 0), i))
        here, there = self._label_counts[over], self._label_counts[under]

        def rarer(node: str) -> tuple[int, str]:
            its = self._labels[node]
            return here.get(its, 0) - there[its], node

        back = min(self.groups[under], key=rarer)
        out = max(node for node in self.groups[over] if self._labels[node] == label)
        self._move(out, over, under)
        self._move(back, under, over)
        return self._labels[back]

    def _best_for(self, node: str) -> int:
        label = self._labels[node]
        open_ = [i for i, group in enumerate(self.groups) if len(group) < self._most]
        return min(
            open_,
            key=lambda i: (
                self._excess(node, i),
                self._label_counts[i].get(label, 0),
                len(self.groups[i]),
                i,
            ),
        )

    def _excess(self, node: str, number: int) -> int:
        """Return how many wide domains would have too many nodes in a group with this node."""
        return sum(
            sum(wide in self._wide.get(other, ()) for other in self.groups[number]) >= self._parity
            for wide in self._wide.get(node, ())
        )

    def _most_alike(self, number: int) -> str:
        counts = self._label_counts[number]
        return max(self.groups[number], key=lambda node: (counts[self._labels[node]], node))

    def _put(self, node: str, number: int) -> None:
        self.groups[number].append(node)
        counts, label = self._label_counts[number], self._labels[node]
        counts[label] = counts.get(label, 0) + 1

    def _take(self, node: str, number: int) -> None:
        self.groups[number].remove(node)
        counts, label = self._label_counts[number], self._labels[node]
        counts[label] -= 1
        if not counts[label]:
            del counts[label]

    def _move(self, node: str, source: int, target: int) -> None:
        self._take(node, source)
        self._put(node, target)


def _counts(labels: Sequence[str]) -> dict[str, int]:
    """Return how often each label occurs; mostly once."""
    once = dict.fromkeys(labels, 1)
    return once if len(once) == len(labels) else dict(Counter(labels))


def _guarded(paths: _Paths, *, most: int) -> Mapping[str, tuple[str, ...]]:
    """Return each node's domains that have others in them, and at most ``most`` nodes, if any.

    No group needs to have more than its share of these.
    """
    wide = {label for path in paths.values() for label in path[:-1]}
    if not wide:
        return {}
    totals = Counter(chain.from_iterable(paths.values()))
    guarded = {label for label in wide if totals[label] <= most}
    return {
        node: tuple([label for label in path if label in guarded]) for node, path in paths.items()
    }


def _spread(group: Collection[str], paths: _Paths, depth: int = 0) -> tuple[str, ...]:
    """Order a group so that the nodes of one domain lie far apart, first those of a wide one.

    If a stripe is shorter than its group, neighbours hold its fragments.
    """
    own = [
        path[depth] if len(path) > depth else path[-1] for path in [paths[node] for node in group]
    ]
    if len(set(own)) == len(own):
        return tuple([node for _, node in sorted(zip(own, group, strict=True))])
    inside: dict[str, list[str]] = defaultdict(list)
    for label, node in zip(own, group, strict=True):
        inside[label].append(node)
    deeper = any(len(paths[node]) > depth + 1 for node in group)
    places = []
    for label, nodes in inside.items():
        ordered = _spread(nodes, paths, depth + 1) if deeper else sorted(nodes)
        total = len(nodes)
        for number, node in enumerate(ordered):
            places.append(((2 * number + 1) / (2 * total), -total, label, node))
    return tuple(node for *_, node in sorted(places))


def _worst_losses(groups: Groups, paths: _Paths, stripe: int) -> dict[str, int]:
    """Return by domain the most nodes it has in a stripe of ``stripe`` nodes (0: the whole group).

    Domains that have at most one node in every group are left out.
    """
    worst: dict[str, int] = {}
    for group in groups:
        labels = [label for node in group for label in paths[node]]
        if len(set(labels)) == len(labels):
            continue
        length = min(stripe or len(group), len(group))
        for start in range(len(group) if length < len(group) else 1):
            nodes = [group[(start + step) % len(group)] for step in range(length)]
            found = Counter(chain.from_iterable(paths[node] for node in nodes))
            for label, most in found.items():
                worst[label] = max(worst.get(label, 0), most)
    return worst
