"""The order in which the parts of a sidecar hear of a snapshot's events."""

from pathlib import Path

from holdfast.ckpt.memory.arena import Arena
from holdfast.ckpt.sidecar.core.book import Release
from holdfast.ckpt.sidecar.core.core import Core, Listeners
from holdfast.ckpt.transport import RunKey


def test_listeners_hear_in_the_order_in_which_they_are_listed(tmp_path: Path) -> None:
    arena = Arena.open(tmp_path, run="order")
    core = Core(arena, RunKey.new(), run="order", node="a")
    heard: list[tuple[str, tuple[int, int]]] = []
    try:
        core.listen(
            Listeners(
                release=tuple(
                    lambda key, name=name: heard.append((name, key))  # type: ignore[misc]
                    for name in ("links", "blocks", "checkpoint")
                )
            )
        )
        core.apply([Release(key=(1, 7))])
    finally:
        core.close()
        arena.remove()
    assert heard == [("links", (1, 7)), ("blocks", (1, 7)), ("checkpoint", (1, 7))]
