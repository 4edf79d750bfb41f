"""What replies to the policy: environments of one or several turns.

An episode begins with a prompt. When a turn of the policy is over, its environment is told what
the policy said, with the state it returned last; it replies with an observation, after which the
policy has another turn, or with the reward, and the episode is over. All that an environment knows
about an episode is in its state: so another worker can go on where one was lost.
"""

from __future__ import annotations

import math
from typing import Final, Protocol, runtime_checkable

import msgspec

from holdfast.adapters.rl.samples.trajectory import SampleId
from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.types import Json, learn

HELD_OUT: Final = 1 << 40
"""The first ordinal of the prompts of evaluations; the policy is never trained on those."""

STATE_BYTES: Final = 4096
"""How long the state of an episode may be, as JSON text: it is written with every turn."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy said in turn number ``turn`` (from 0) of an episode.

    ``text`` is without the end token; ``ended`` tells whether there was one, or the turn was as
    long as it may be. ``state`` is what the environment returned last, None in the first turn.
    """

    ordinal: int
    sample: int
    turn: int
    text: str
    ended: bool
    state: Json = None

    @property
    def key(self) -> SampleId:
        """Return (ordinal, sample)."""
        return self.ordinal, self.sample


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's reply: ``text`` that the policy reads next, and the new ``state``.

    The state is made of what JSON has, and at most `STATE_BYTES` long. A ``reward`` ends the
    episode; what would be read next does not count then.
    """

    text: str = ""
    state: Json = None
    reward: float | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward}, needed: a finite number")
        if len(text := self.state_text) > STATE_BYTES:
            raise ValueError(f"the state has {len(text)} bytes as JSON, at most: {STATE_BYTES}")

    @property
    def state_text(self) -> str:
        """The state as JSON text."""
        return msgspec.json.encode(self.state).decode()


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was given up: the episode ends with reward 0 for this ``reason``."""

    reason: str


Reply = Observation | Failed


class ToolError(HoldfastError):
    """A tool failed, and may do better when it is called again.

    Environments raise it. Any other error of an environment is taken for a fault of its code and
    ends the worker.
    """

    code = "HF026"
    remedy = "Call the tool again; the rollout worker does so by itself."


@runtime_checkable
class Environment(Protocol):
    """Prompts, and replies to what the policy says.

    Both are functions of what they are given and of nothing else: a call may be made again, by
    another process, when its reply was lost. They are called by several threads at once.
    """

    def prompt(self, ordinal: int) -> str:
        """Return the prompt of an ordinal; from `HELD_OUT` on it is one of an evaluation."""

    def respond(self, action: Action) -> Observation:
        """Return what follows on a turn. May take long; raises `ToolError` for a passing fault."""


class EnvironmentCalls(Protocol):
    """Calls of an environment under way: `calls.ThreadedCalls`, or a fake's."""

    def submit(self, action: Action) -> None:
        """Have a turn replied to."""

    def replies(self, wait_s: float) -> list[tuple[SampleId, Reply]]:
        """Return, once each, the replies that came; wait up to ``wait_s`` for the first."""

    def drop(self, keys: set[SampleId]) -> None:
        """Forget the calls of these samples: nobody waits for their replies."""


learn(globals())
