"""Rounds whose completions come from the rollout ledger: a round serves one step, once.

All ranks draw a round at the begin of its step. Rank 0 samples, or the processes that attached; the
ledger's rules say what a loss repeats. Rewards and scores are made as for other rounds.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from holdfast.adapters.hf.grpo.prompts import Prompts
from holdfast.adapters.hf.grpo.shape import Epochs, RoundShape
from holdfast.adapters.hf.ledger_rollouts import LedgerRollouts, columns, limits_of, prompt_tokens
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.library import Rollouts
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Delta
from holdfast.ckpt.types import Json
from holdfast.elastic import ConfigError, Run

FILE: Final = "holdfast_ledger.json"


class _Rollouts(Rollouts):
    """Rollouts that end with their generation, and go on if a run is made longer or shorter."""

    def added(self, sample: Sample, delta: Delta) -> None:
        """Log tokens added to a sample; raise ``GenerationOverError`` if the ranks change."""
        super().added(sample, delta)
        self._run.check()

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace everything by what ``state_dict`` returned; the run may have other ``steps``."""
        found = copy.copy(state["ledger"])
        found["plan"] = {**found["plan"], "steps": self.ledger.plan.steps}
        super().load_state_dict({**state, "ledger": found})


class LedgerOfRounds:
    """The ledger of one generation, whose step t has the prompts of the round that it begins.

    ``steps`` is the number of the whole training.
    """

    def __init__(
        self,
        trainer: Any,
        run: Run,
        shape: RoundShape,
        *,
        prompts: Prompts,
        epochs: Epochs,
        steps: int,
    ) -> None:
        self._trainer, self._run, self._shape = trainer, run, shape
        self._prompts, self._epochs = prompts, epochs
        self._given: LedgerRollouts = trainer.rollout_func
        self._known: tuple[int, list[Tokens]] = (-1, [])
        plan = BatchPlan(
            mode=Mode.SYNC,
            eta=0,
            groups=shape.completions // shape.group,
            group=shape.group,
            steps=steps,
            limits=limits_of(trainer),
        )
        self.rollouts = self._given.live = _Rollouts(
            run,
            plan,
            self._prompt_of,
            log_every_tokens=self._given.log_every_tokens,
            fatal=self._given.fatal,
        )

    def serving(self) -> AbstractContextManager[None]:
        """Return a context in which other processes may sample, if the user wants that."""
        directory = self._given.directory
        if directory is None:
            return nullcontext()
        return self.rollouts.serve(directory, self._trainer.model, silence_s=self._given.silence_s)

    def draw(self) -> list[dict[str, Any]]:
        """Return the completions of the present step's round, chunk by chunk; collective."""
        if self._given.directory is None and self._run.is_leader:
            answers = list(self.rollouts.samples())
            longest = max(map(len, self._tokens_of(self._run.completed)))
            context = longest + self.rollouts.limits.max_new_tokens
            self._given.finish(answers, self._trainer, sink=self.rollouts, context=context)
        drawn, size = self.rollouts.batch(), self._shape.chunk
        return [columns(drawn[at : at + size]) for at in range(0, len(drawn), size)]

    def save(self, folder: Path) -> None:
        """Write the file of a ``checkpoint-N``."""
        told = {**self.rollouts.state_dict(), "workers": []}  # their logs end with the run
        (folder / FILE).write_text(json.dumps(told))

    def load(self, folder: Path, step: int) -> None:
        """Take the ledger of a ``checkpoint-N``, with which a run goes on after ``step`` steps.

        Raises ``ConfigError`` if there is none.
        """
        path = folder / FILE
        try:
            state = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"{folder} has no ledger of its {step} steps ({error}): resume from a checkpoint "
                "that a run with ledger_rollouts saved, or train from its weights anew"
            ) from error
        self.rollouts.load_state_dict(state)

    def _prompt_of(self, ordinal: int) -> Tokens:
        step, place = divmod(ordinal, self._shape.completions // self._shape.group)
        return self._tokens_of(step)[place]

    def _tokens_of(self, step: int) -> list[Tokens]:
        """Return the tokens of the prompts of a step, one for each group."""
        if self._known[0] != step:
            epoch, microbatches = self._epochs.of_step(step)
            (number,) = self._shape.rounds_of(microbatches)
            rows = self._prompts.rows(epoch, number)
            texts = [copy.deepcopy(row["prompt"]) for row in rows[:: self._shape.group]]
            self._known = step, prompt_tokens(self._trainer, texts)
        return self._known[1]
