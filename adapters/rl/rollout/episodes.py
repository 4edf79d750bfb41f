"""An engine for episodes: an environment replies to every turn.

A trajectory whose turn is over leaves its slot and waits for the reply, without delaying the
sampling of others; with the reply it continues in the next free slot. To a worker this is an
engine: it takes, shows and returns trajectories, waiting ones included, and provides the deltas for
the log.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import Tensor

from holdfast.adapters.rl.environments.base import Action, EnvironmentCalls, Failed, Reply
from holdfast.adapters.rl.rollout.engine import Engine, Logged, unlogged
from holdfast.adapters.rl.samples.tokens import Tokenizer
from holdfast.adapters.rl.samples.trajectory import Delta, SampleId, Trajectory

_PAUSE_S = 0.02


class Episodes:
    """Samples episodes; at most ``waiting`` wait for replies beside those in the engine's slots.

    Waiting trajectories count as in progress: a pinned engine keeps its weights until they are
    over.
    """

    def __init__(
        self, engine: Engine, calls: EnvironmentCalls, *, tokenizer: Tokenizer, waiting: int = 64
    ) -> None:
        self._engine, self._calls, self._tokenizer = engine, calls, tokenizer
        self._most = engine.slots + waiting
        self._waiting: dict[SampleId, Trajectory] = {}
        self._back: dict[SampleId, tuple[Trajectory, Logged]] = {}

    @property
    def pinned(self) -> bool:
        """True if weights change only when nothing is in progress."""
        return self._engine.pinned

    @property
    def renewable(self) -> bool:
        """True if newer weights may be loaded while samples are in progress."""
        return not self.pinned

    @property
    def slots(self) -> int:
        """Number of sequences that are sampled at a time."""
        return self._engine.slots

    @property
    def version(self) -> int | None:
        """Policy version of the weights; None before the first."""
        return self._engine.version

    @property
    def generation(self) -> int:
        """Generation in which the weights were pulled."""
        return self._engine.generation

    @property
    def free(self) -> int:
        """Number of trajectories that may still be put."""
        at_work = self.slots - self._engine.free + len(self._waiting) + len(self._back)
        return max(0, min(self._engine.free - len(self._back), self._most - at_work))

    @property
    def idle(self) -> bool:
        """True if nothing is in progress or waits for a reply."""
        return self._engine.idle and not self._waiting and not self._back

    def load(self, weights: Mapping[str, Tensor], *, version: int, generation: int) -> None:
        """Load the weights of a policy version; samples in progress continue under them."""
        if self.pinned and not self.idle:
            raise RuntimeError(f"version {version} offered while version {self.version} is in use")
        self._engine.load(weights, version=version, generation=generation)

    def unload(self) -> None:
        """Forget the weights and all unfinished samples."""
        self._engine.unload()
        self._calls.drop({*self._waiting})
        self._waiting.clear()
        self._back.clear()

    def put(self, trajectory: Trajectory) -> None:
        """Start or continue an episode; one whose turn is over waits for its reply at once."""
        if self._engine.limits.turn_over(trajectory):
            self._submit(trajectory)
            self._engine.note(unlogged(trajectory, (0, 0)))
        else:
            self._engine.put(trajectory)

    def running(self) -> list[Trajectory]:
        """Return the unfinished trajectories, as they are now."""
        back = [trajectory for trajectory, _ in self._back.values()]
        return [*self._engine.running(), *self._waiting.values(), *back]

    def progress(self) -> dict[SampleId, int]:
        """Return how many tokens of each running trajectory were sampled."""
        back = {key: trajectory.sampled for key, (trajectory, _) in self._back.items()}
        waiting = {key: trajectory.sampled for key, trajectory in self._waiting.items()}
        return self._engine.progress() | waiting | back

    def oldest(self) -> dict[SampleId, int]:
        """Return the oldest version of each running trajectory's tokens, future ones included."""
        back = [trajectory for trajectory, _ in self._back.values()]
        aside = {each.key: each.oldest or 0 for each in (*self._waiting.values(), *back)}
        return self._engine.oldest() | aside

    def drop(self, keys: set[SampleId]) -> None:
        """Stop working on these samples."""
        self._engine.drop(keys)
        self._calls.drop(keys & self._waiting.keys())
        for key in keys:
            self._waiting.pop(key, None)
            self._back.pop(key, None)

    def tick(self) -> list[Trajectory]:
        """Take replies and feed one token per occupied slot; return the finished trajectories."""
        nothing_else = self._engine.idle and not self._back
        finished = []
        for key, reply in self._calls.replies(_PAUSE_S if nothing_else else 0.0):
            trajectory = self._waiting.pop(key)
            replied = self._replied(trajectory, reply)
            logged = (len(trajectory.tokens), len(trajectory.turns))
            if replied.reward is None:
                self._back[key] = (replied, logged)
            else:
                self._engine.note(unlogged(replied, logged))
                finished.append(replied)
        for key in [*self._back][: self._engine.free]:
            replied, logged = self._back.pop(key)
            self._engine.put(replied, logged=logged)
        for trajectory in self._engine.tick():
            self._submit(trajectory)
        return finished

    def take_deltas(self) -> list[Delta]:
        """Return, once, everything new since the last call, for the worker's log."""
        deltas = self._engine.take_deltas()
        for key, (trajectory, logged) in self._back.items():
            whole = (len(trajectory.tokens), len(trajectory.turns))
            if logged != whole:
                deltas.append(unlogged(trajectory, logged))
                self._back[key] = (trajectory, whole)
        return deltas

    def _submit(self, trajectory: Trajectory) -> None:
        self._waiting[trajectory.key] = trajectory
        tokens = trajectory.tokens[trajectory.turn_start :]
        ended = tokens[-1] == self._tokenizer.end
        self._calls.submit(
            Action(
                ordinal=trajectory.ordinal,
                sample=trajectory.sample,
                turn=len(trajectory.turns),
                text=self._tokenizer.decode(tokens[:-1] if ended else tokens),
                ended=ended,
                state=msgspec.json.decode(trajectory.state),
            )
        )

    def _replied(self, trajectory: Trajectory, reply: Reply) -> Trajectory:
        if isinstance(reply, Failed):
            return trajectory.replied((), state=trajectory.state, reward=0.0, reason=reply.reason)
        if reply.reward is not None:
            return trajectory.replied((), state=reply.state_text, reward=float(reply.reward))
        observed = self._tokenizer.encode(reply.text)
        length = len(trajectory.prompt) + len(trajectory.tokens) + len(observed)
        if length >= (room := self._engine.limits.context):
            reason = f"{length} tokens with the observation leave no room in a context of {room}"
            return trajectory.replied((), state=trajectory.state, reward=0.0, reason=reason)
        return trajectory.replied(observed, state=reply.state_text)
