"""The interface of environments, which reply to the policy in one or several turns.

An episode begins with a prompt. When a turn of the policy is over, its environment gets the
policy's text, with the state it returned last. It replies with an observation, after which the
policy has another turn, or with the reward, and the episode is over. All that an environment knows
about an episode is in its state, so another worker can continue where one was lost.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from holdfast.adapters.rl.samples.trajectory import SampleId
from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError, HoldfastError
from holdfast.ckpt.types import Json, learn

HELD_OUT: Final = 1 << 40
"""The first ordinal of the prompts of evaluations; the policy is never trained on those."""

STATE_BYTES: Final = 4096
"""Largest length of an episode's state, as JSON text: it is written with every turn."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's text in turn number ``turn`` (from 0) of an episode.

    ``text`` is without the end token; ``ended`` is True if there was one, False if the turn reached
    its largest length. ``state`` is the environment's last state, None in the first turn.
    ``speaker`` is the policy that spoke, empty for the only one of a job.
    """

    ordinal: int
    sample: int
    turn: int
    text: str
    ended: bool
    state: Json = None
    speaker: str = ""

    @property
    def key(self) -> SampleId:
        """(ordinal, sample)."""
        return self.ordinal, self.sample


_RULES: Final[Mapping[str, checks.Rule]] = {
    "text": checks.instance(str, remedy="give a text"),
    "reward": checks.optional(
        checks.number(
            -sys.float_info.max, sys.float_info.max, remedy="give a finite float, or None"
        )
    ),
    "speaker": checks.instance(str, remedy="give the name of a policy"),
}


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's reply: ``text`` that the policy reads next, and the new ``state``.

    The state consists of JSON values, and is at most `STATE_BYTES` long. A ``reward`` ends the
    episode; ``text`` has no effect then. In a job of several policies, ``speaker`` has the next
    turn, empty: the one that spoke; ``rewards`` by policy may end the episode in place of
    ``reward``, which then is their mean, or beside it. Raises ``ArgumentError`` for any other
    values.
    """

    text: str = ""
    state: Json = None
    reward: float | None = None
    speaker: str = ""
    rewards: dict[str, float] = {}

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ArgumentError)
        for name, reward in self.rewards.items():
            if not isinstance(reward, (int, float)) or not math.isfinite(reward):
                found = checks.shown(reward)
                raise ArgumentError(
                    f"Observation(rewards=…): {name} gets {found}; give a finite float"
                )
        try:
            text = self.state_text
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            found = checks.shown(self.state)
            raise ArgumentError(
                f"Observation(state={found}): give JSON values ({error})"
            ) from error
        if len(text) > STATE_BYTES:
            raise ArgumentError(
                f"Observation(state=…): {len(text)} bytes as JSON; keep at most {STATE_BYTES}"
            )

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
    """Prompts, and replies to the policy's text.

    Both methods depend on their arguments alone: a call may be repeated, by another process, when
    its reply was lost. Several threads call them at once.
    """

    def prompt(self, ordinal: int) -> str:
        """Return the prompt of an ordinal; from `HELD_OUT` on it is one of an evaluation."""

    def respond(self, action: Action) -> Observation:
        """Return the reply to a turn. May take long; raises `ToolError` for a passing fault."""


class FrozenPolicy(Protocol):
    """A policy of the job that is never trained, as environments ask it; see `PolicyJudge`."""

    def logprobs(self, text: str, answer: str, *, ended: bool = False) -> list[float]:
        """Return the log-probability of each token of ``answer`` behind ``text``.

        With ``ended`` the end token counts as the last one of the answer.
        """


class FrozenClassifier(Protocol):
    """A model of the job that scores texts, as environments ask it; see `Classifier`."""

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their scores."""

    def scores(self, text: str, answer: str | None = None) -> list[float]:
        """Return the score of each class for a text, or for a pair: its logits."""


FrozenModel: TypeAlias = FrozenPolicy | FrozenClassifier

NO_POLICIES: Final[Mapping[str, FrozenModel]] = MappingProxyType({})
"""The frozen policies of a job that has none."""


class EnvironmentCalls(Protocol):
    """An environment's calls in progress: `calls.ThreadedCalls`, or a fake's."""

    def submit(self, action: Action) -> None:
        """Request the reply to a turn."""

    def replies(self, wait_s: float) -> list[tuple[SampleId, Reply]]:
        """Return, once each, the replies that came; wait up to ``wait_s`` for the first."""

    def drop(self, keys: set[SampleId]) -> None:
        """Forget the calls of these samples: their replies are not needed."""


learn(globals())
