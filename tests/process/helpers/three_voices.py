"""An environment in which three policies speak, one after the other, and each earns its own."""

from __future__ import annotations

from holdfast.adapters.rl.environments.base import Action, Observation


class ThreeVoices:
    """The solver speaks, then the critic, then the judge; many different letters earn much."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def prompt(self, ordinal: int) -> str:
        return f"{(ordinal + self._seed) % 10}>"

    def respond(self, action: Action) -> Observation:
        said = [*(action.state or []), action.text]
        if len(said) < 3:
            return Observation(text="?", speaker=("critic", "judge")[len(said) - 1], state=said)
        solver, critic, judge = (len(set(text)) / 8 for text in said)
        return Observation(rewards={"solver": solver, "critic": critic, "judge": judge})
