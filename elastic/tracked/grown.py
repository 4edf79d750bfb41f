"""The rule that tracked modules, dicts and lists keep the tensors that a loop begins with.

A restore builds the state anew by the script, up to the first step, and copies into it. It has no
place for a tensor that a later step adds, and it misses one that a later step removes. Optimizers
and objects with ``load_state_dict`` are restored as a whole, so these may grow.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.ckpt.state.capture import CapturePlan, FlatState
from holdfast.ckpt.state.local_boxes import Leaf
from holdfast.elastic.errors import ConfigError


class BuiltTensors:
    """The tensors of one generation's tracked state that a restore must find built."""

    def __init__(self) -> None:
        self._plan: CapturePlan | None = None
        self._built: dict[str, tuple[int, ...]] | None = None

    def look(self, flat: FlatState, plan: CapturePlan, *, step: int) -> None:
        """Compare the state after ``step`` steps with that before the first of the generation.

        Raises ``ConfigError`` naming a tensor that was added, removed or got another shape.
        """
        if plan is self._plan:
            return  # it fits, so nothing was added or removed
        self._plan, now = plan, _built(flat)
        if self._built is None:
            self._built = now
            return
        before = self._built
        for name in sorted(before.keys() | now.keys()):
            if name not in before:
                change = "was added"
            elif name not in now:
                change = "was removed"
            elif before[name] != now[name]:
                change = f"had shape {before[name]} and has {now[name]}"
            else:
                continue
            raise ConfigError(
                f"{name} {change} by step {step - 1}, and a restore, which builds the state as the "
                "script does before its first step, has no place for that: build modules whole "
                "before run.track and freeze what trains later by requires_grad_(False); register "
                "buffers that need not be saved with persistent=False; put tensors that come and "
                "go into an object with state_dict and load_state_dict"
            )


def _built(flat: FlatState) -> dict[str, tuple[int, ...]]:
    grow = tuple(f"{path}." for path in (*flat.trees, *flat.optimizers, *flat.rank_trees))
    fixed: Mapping[str, Leaf] = {
        name: leaf
        for name, leaf in (flat.tensors | flat.left_out).items()
        if name not in flat.own and not name.startswith(grow)
    }
    return {name: tuple(leaf.shape) for name, leaf in fixed.items()}
