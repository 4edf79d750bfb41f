"""An answer in several turns, as user-written sampling loops see it: policies and replies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.rollout.engine import unlogged
from holdfast.adapters.rl.rollout.voices import replied
from holdfast.adapters.rl.samples.sample import Sample, SampleSink
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError


class Episode(Sample):
    """An answer in several turns; a plan with ``TurnLimits(turns=True)`` has such ones.

    While a turn lasts, `extend` adds its tokens. When it is over (`turn_over`), `reply` adds what
    the policies read next, and says who speaks, or ends the episode with rewards. Replies are
    logged as tokens are. ``policies`` are the names of those that speak; the first one begins.
    """

    def __init__(
        self,
        keeper: SampleSink,
        start: Trajectory,
        *,
        version: int,
        policies: Sequence[str] = ("",),
    ) -> None:
        super().__init__(keeper, start, version=version)
        self._names = tuple(policies)

    @property
    def finished(self) -> bool:
        """True if nothing more is to be added: it has its rewards, or was given up."""
        return self._start.reward is not None or self.given_up

    @property
    def speaker(self) -> str:
        """Name of the policy that has the turn; empty for the only one."""
        return self._names[self._start.speaker]

    @property
    def turn(self) -> int:
        """Number of the turn, from 0."""
        return len(self._start.turns)

    @property
    def spoken(self) -> Tokens:
        """The tokens of the turn so far."""
        return tuple(self._tokens[self._start.turn_start :])

    @property
    def turn_over(self) -> bool:
        """True if the turn has its last token, so that a reply is due."""
        spoken = self.spoken
        before = len(self.prompt) + self._start.turn_start
        return bool(spoken) and self._keeper.limits.over(before, len(spoken), spoken[-1])

    @property
    def state(self) -> Json:
        """The state of the last reply, None before the first."""
        return msgspec.json.decode(self._start.state)

    def action(self, text: str) -> Action:
        """Return the turn as environments take it; ``text`` is its text without the end token."""
        return Action(
            ordinal=self.ordinal,
            sample=self.sample,
            turn=self.turn,
            text=text,
            ended=self.spoken[-1:] == (self._keeper.limits.end,),
            state=self.state,
            speaker=self.speaker,
        )

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add tokens that the policy whose turn it is sampled; see `Sample.extend`.

        Raises ``ConfigError`` once the turn is over.
        """
        if not self.finished and self.turn_over:
            raise ConfigError(
                f"turn {self.turn} of sample {self._start.key} is over: reply() before more tokens"
            )
        super().extend(tokens, logprobs)

    def reply(self, observation: Observation, tokens: Sequence[int] = ()) -> None:
        """Reply to a turn that is over; ``tokens`` are those of the observation's text.

        ``observation`` means what it means where an environment returns it. If the tokens leave no
        room in the context, the episode ends with reward 0. Raises ``ConfigError`` while the turn
        lasts, and ``JobFailedError`` for a name that no policy has.
        """
        if self.given_up:
            return
        if self.finished or not self.turn_over:
            why = "is finished" if self.finished else f"has a turn {self.turn} that lasts"
            raise ConfigError(f"sample {self._start.key} {why}: reply when turn_over says so")
        if observation.text and not tokens:
            raise ConfigError(
                f"sample {self._start.key}: reply(Observation(text={observation.text!r})) has no "
                "tokens: give those of the text, or leave it out"
            )
        before = self.trajectory()
        numbers, _ = self._checked(tokens, [0.0] * len(tokens))
        context = self._keeper.limits.context
        now = replied(before, observation, numbers, names=self._names, context=context)
        self._start, self._tokens = now, list(now.tokens)
        self._keeper.added(self, unlogged(now, (len(before.tokens), len(before.turns))))
