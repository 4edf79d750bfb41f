"""Where in the snapshots the weights of a policy version are.

A version is the snapshot of its step. Where a job has checkpoints, its snapshots also *retain* the
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
"""The name under which it tracks earlier ones."""

VERSIONS = f"{RETAINED}.versions"
"""The tensor that says which version is in which slot of what is retained."""


class WeightsPlace(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Weights of policy ``version`` in the snapshot of ``step`` by ``generation``.

    ``slot``: of what that snapshot retains; None where it is the version's own.
    """

    generation: int
    step: int
    version: int
    slot: int | None = None

    @property
    def prefix(self) -> str:
        """What the stored names of the policy's parameters begin with."""
        return MODEL if self.slot is None else f"{RETAINED}.{self.slot}"

    def fqns(self, names: Iterable[str]) -> list[str]:
        """Return the stored names of parameters, in their order.

        Of what is retained the last one is `VERSIONS`, which is to be compared.
        """
        found = [f"{self.prefix}.{name}" for name in names]
        return found if self.slot is None else [*found, VERSIONS]


def slot_of(version: int, *, retained: int) -> int:
    """Return which of ``retained`` slots a version is in."""
    return version % retained


def candidates(version: int, *, retained: int) -> Iterator[tuple[int, int | None]]:
    """Yield (step, slot) of the snapshots that may have a version, its own first.

    ``retained`` is how many earlier versions a snapshot has.
    """
    yield version, None
    for step in range(version + 1, version + 1 + retained):
        yield step, slot_of(version, retained=retained)


learn(globals())
