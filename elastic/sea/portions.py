"""Portions: groups of whole parameters that are merged at different tides. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.elastic.errors import ConfigError


def portions_of(counts: Sequence[int], portions: int) -> tuple[range, ...]:
    """Return contiguous groups of parameters, as even as possible by their number of elements.

    ``counts`` are the elements of each parameter. The largest group is as small as it can be. Every
    group has at least one parameter. Raises ``ConfigError`` if there are fewer parameters.
    """
    if portions > len(counts):
        raise ConfigError(
            f"Islands(portions={portions}): the model has {len(counts)} trainable parameters, and "
            f"a portion has whole ones; give portions={max(1, len(counts))} or fewer"
        )
    low, high = max(counts), sum(counts)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(counts, middle, portions)) <= portions:
            high = middle
        else:
            low = middle + 1
    return _filled(counts, low, portions)


def _filled(counts: Sequence[int], most: int, portions: int) -> tuple[range, ...]:
    """Return groups of at most ``most`` elements, split further where there are too few groups."""
    groups: list[range] = []
    start, held = 0, 0
    for at, count in enumerate(counts):
        is_last_chance = len(counts) - at == portions - len(groups) - 1
        if at > start and (held + count > most or is_last_chance):
            groups.append(range(start, at))
            start, held = at, 0
        held += count
    return (*groups, range(start, len(counts)))


def merges_of(portion: int, tide: int, *, portions: int) -> int:
    """Return how many of a sea's first ``tide`` merges were of a portion."""
    return max(0, -(-(tide - portion) // portions))


def last_of(portion: int, *, portions: int) -> int:
    """Return the number, beyond those of portions, by which a work for the last merge is known.

    So it is none that a meeting may name.
    """
    return portions + portion
