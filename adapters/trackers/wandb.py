"""Weights & Biases as a tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from holdfast.adapters.trackers.journal import StepJournal
from holdfast.adapters.trackers.needed import needed
from holdfast.adapters.trackers.wandb_parts import steps_in
from holdfast.elastic.errors import ConfigError

MODES: Final = ("offline", "online")


class WandB:
    """Logs each step to a run of Weights & Biases; needs the extra ``wandb``.

    Each process that leads the run writes a part of it below ``directory``, under one id. The
    package buffers, so a kill may cost a part its last steps. They lie in a journal in
    ``directory`` too, and the next part begins with the steps that no part has. In mode
    ``"offline"`` send the parts with ``wandb sync --append`` in their order.
    """

    def __init__(
        self,
        project: str,
        *,
        run: str,
        directory: str | Path,
        mode: str = "offline",
        **options: Any,
    ) -> None:
        """``run`` is the id and the name of the run in ``project``.

        ``directory`` must be one to which every node can write. ``options`` go to ``wandb.init``.
        Raises ``ConfigError`` for another ``mode``.
        """
        if mode not in MODES:
            raise ConfigError(f"WandB(mode={mode!r}): give {' or '.join(map(repr, MODES))}")
        self._named = {"project": project, "id": run, "name": run, "mode": mode}
        self._directory, self._options = Path(directory).absolute(), options
        self._journal = StepJournal(self._directory / f"{run}.steps.jsonl")
        self._run: Any = None

    def begin(self) -> int:
        """Begin a part, with the steps that no part has; return the last step, -1 for none."""
        wandb = needed("wandb", tracker="WandB", extra="wandb")
        known = self._journal.open()
        offline = self._named["mode"] == "offline"
        last = max(steps_in(self._directory, str(self._named["id"])), default=-1) if offline else -1
        self._run = wandb.init(
            dir=str(self._directory),
            **{"resume": "allow", "reinit": "create_new", **self._options, **self._named},
        )
        if not offline:
            last = int(self._run.step) - 1
        for step, metrics in known.items():
            if step > last:
                self._run.log(metrics, step=step, commit=True)
        return max(known, default=-1)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Note the step in the journal, and hand it to the process of wandb."""
        self._journal.add(step, metrics)
        self._run.log(metrics, step=step, commit=True)

    def close(self) -> None:
        """End the part."""
        self._journal.close()
        self._run.finish()
