"""The mark of a state that was set from neighbours; it stays in every later checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from holdfast.ckpt.types import Json, learn

CURSOR = "holdfast"
"""The name of the run's own progress among the values of a checkpoint."""

FIELD = "approximate"
"""The marks, in the run's own progress."""


class ApproximateMark(msgspec.Struct, frozen=True, kw_only=True):
    """The stages that were set from others after ``step`` complete steps, in ``generation``.

    ``stages`` maps the number of each such stage, as text, to the numbers of those it came from.
    """

    step: int
    generation: int
    stages: dict[str, tuple[int, ...]]

    @property
    def origins(self) -> str:
        """The stages and those that they came from, in words."""
        parts = [
            f"stage {stage} from {'stages' if len(near) > 1 else 'stage'} "
            f"{' and '.join(map(str, near))}"
            for stage, near in sorted(self.stages.items(), key=lambda item: int(item[0]))
        ]
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The mark in words."""
        return f"approximate since step {self.step}: {self.origins}"

    def plain(self) -> dict[str, Json]:
        """Return the mark as plain values of a state; a dict in order is stored as an object."""
        return {
            "step": self.step,
            "generation": self.generation,
            "stages": {stage: list(near) for stage, near in sorted(self.stages.items())},
        }


def marks_of(values: Mapping[str, Json]) -> tuple[ApproximateMark, ...]:
    """Return the marks among the values of a checkpoint; none if it has no readable ones."""
    found = _entries(values.get(CURSOR)).get(FIELD, [])
    try:
        return msgspec.convert([_entries(each) for each in found], tuple[ApproximateMark, ...])
    except (msgspec.ValidationError, TypeError):
        return ()


def _entries(value: Json) -> Mapping[str, Json]:
    """Return the entries of a stored dict: an object, or a ``$map`` if its order counts."""
    if not isinstance(value, Mapping):
        return {}
    pairs = value.get("$map")
    return dict(pairs) if isinstance(pairs, list) else value


def in_words(marks: Iterable[ApproximateMark]) -> str:
    """Return all marks as one line, "" for none."""
    return "; ".join(mark.text for mark in marks)


learn(globals())
