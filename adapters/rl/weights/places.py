"""The places of a policy version's weights in the snapshots.

A version is the snapshot of its step. If a job has checkpoints, its snapshots also *retain* the
versions before: after a cold start nothing else is left of them
(`holdfast.adapters.rl.weights.retained`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from holdfast.ckpt.types import learn

MODEL = "model"
"""The name under which the trainer tracks its policy."""

RETAINED = "retained"
"""The name under which the trainer tracks earlier policy versions."""

VERSIONS = f"{RETAINED}.versions"
"""The tensor that maps each retained slot to its version."""


class WeightsPlace(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Weights of policy ``version`` in the snapshot of ``step`` by ``generation``.

    ``slot`` is the slot among that snapshot's retained versions; None: the version's own snapshot.
    """

    generation: int
    step: int
    version: int
    slot: int | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the stored names of the policy's parameters."""
        return MODEL if self.slot is None else f"{RETAINED}.{self.slot}"

    def fqns(self, names: Iterable[str]) -> list[str]:
        """Return the stored names of parameters, in their order.

        For a retained version the last name is `VERSIONS`, which the reader has to compare.
        """
        found = [f"{self.prefix}.{name}" for name in names]
        return found if self.slot is None else [*found, VERSIONS]


def slot_of(version: int, *, retained: int) -> int:
    """Return which of ``retained`` slots holds a version."""
    return version % retained


def candidates(version: int, *, retained: int) -> Iterator[tuple[int, int | None]]:
    """Yield (step, slot) of the snapshots that may have a version, its own first.

    ``retained`` is how many earlier versions a snapshot has.
    """
    yield version, None
    for step in range(version + 1, version + 1 + retained):
        yield step, slot_of(version, retained=retained)


learn(globals())
