"""Choice of the mesh for the available trainers, from the sizes that a job accepts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from holdfast.elastic.membership.records import JobSpec, MeshSize

PREFERRED_SHARE = 0.75
"""The first preference is taken unless another mesh would use over a third more trainers."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's coordinates on the three axes that place ranks."""

    dp: int
    pp: int
    tp: int


def coordinates(rank: int, mesh: MeshSize) -> Coordinates:
    """Return a rank's coordinates; the ranks of a data-parallel group are consecutive."""
    rest, tp = divmod(rank, mesh.tp)
    dp, pp = divmod(rest, mesh.pp)
    return Coordinates(dp, pp, tp)


def rank_of(place: Coordinates, mesh: MeshSize) -> int:
    """Return the rank at these coordinates."""
    return (place.dp * mesh.pp + place.pp) * mesh.tp + place.tp


def accepted(spec: JobSpec) -> Iterator[MeshSize]:
    """Yield the meshes of one data-parallel group that the job accepts, preferred ones first."""
    sizes = (spec.tp, spec.pp, spec.ep, spec.shard)
    choices = list(product(*(enumerate(accepted) for accepted in sizes)))
    choices.sort(key=lambda each: (sum(at for at, _ in each), [at for at, _ in each]))
    for (_, tp), (_, pp), (_, ep), (_, shard) in choices:
        if spec.goes(ep=ep, shard=shard):
            yield MeshSize(dp=1, tp=tp, pp=pp, ep=ep, shard=shard)


def choose_mesh(spec: JobSpec, *, trainers: int) -> tuple[MeshSize | None, str]:
    """Return the mesh for this number of trainers, None if they are too few; and the reason.

    With a fixed ``dp`` the first accepted sizes that fit are taken. Otherwise there are as many
    data-parallel groups as the trainers allow (at most ``max_dp``, a multiple of ``ep`` and
    ``shard``), and the first accepted sizes that use at least `PREFERRED_SHARE` of the most
    trainers that any sizes use.
    """
    fitting = [mesh for each in accepted(spec) if (mesh := _fit(spec, each, trainers))]
    if not fitting:
        return None, shortage(spec, trainers=trainers)
    most = max(mesh.ranks for mesh in fitting)
    enough = 1 if spec.dp is not None else PREFERRED_SHARE * most
    chosen = next(mesh for mesh in fitting if mesh.ranks >= enough)
    reason = f"mesh {chosen.text}"
    if chosen.near > 1:
        reason = f"{reason}, {chosen.ranks // chosen.near} groups of {chosen.near} ranks"
    if chosen != fitting[0]:
        reason = f"{reason} ({fitting[0].text} would use {fitting[0].ranks})"
    return chosen, reason


def shortage(spec: JobSpec, *, trainers: int) -> str:
    """Return how many trainers the smallest accepted mesh needs and how many there are, as text."""
    return f"{trainers} of the {spec.least} trainers that the smallest accepted mesh needs"


def _fit(spec: JobSpec, mesh: MeshSize, trainers: int) -> MeshSize | None:
    dp = trainers // mesh.cell
    if spec.dp is not None:
        dp = spec.dp if dp >= spec.dp else 0
    elif spec.max_dp is not None:
        dp = min(dp, spec.max_dp)
    dp -= dp % max(mesh.ep, mesh.shard)  # one divides the other
    if dp < max(spec.least_dp, 1):
        return None
    return MeshSize(dp=dp, tp=mesh.tp, pp=mesh.pp, ep=mesh.ep, shard=mesh.shard)
