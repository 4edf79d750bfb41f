"""TensorBoard's event files as a tracker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.adapters.trackers.needed import needed


class TensorBoard:
    """Writes each metric of a step as a scalar; needs the extra ``tensorboard``.

    Each process that leads the run begins a file of its own there; TensorBoard shows them as one
    run. A step is in the file before the next one begins.
    """

    def __init__(self, directory: str | Path) -> None:
        """``directory`` must be one to which every node can write; it is made if need be."""
        self._directory = Path(directory).absolute()
        self._writer: Any = None

    def begin(self) -> int:
        """Open a new file; return the last step in the files that are there, -1 for none."""
        board = needed("torch.utils.tensorboard", tracker="TensorBoard", extra="tensorboard")
        last = next(_last_steps(self._directory), -1)
        self._writer = board.SummaryWriter(str(self._directory))
        return last

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the step's scalars, and wait until they are in the file."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _last_steps(directory: Path) -> Iterator[int]:
    """Yield the last step of each event file that has one, the newest file first.

    The last record of a process that was killed may be torn; it counts as not written.
    """
    loader = needed(
        "tensorboard.backend.event_processing.event_file_loader",
        tracker="TensorBoard",
        extra="tensorboard",
    )
    paths = directory.glob("events.out.tfevents.*")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        steps = [
            each.step for each in loader.EventFileLoader(str(path)).Load() if each.summary.value
        ]
        if steps:
            yield max(steps)
