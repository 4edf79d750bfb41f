"""An engine for episodes: an environment replies to every turn, and says who speaks next.

A trajectory whose turn is over leaves its slot and waits for the reply, without delaying the
sampling of others; with the reply it continues in the next free slot. Several policies have an
engine each, all of one policy version; a trajectory is in that of its speaker. To a worker this is
an engine: it takes, shows and returns trajectories, waiting ones included, and provides the deltas
for the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from holdfast.adapters.rl.environments.base import Action, EnvironmentCalls, Failed, Reply
from holdfast.adapters.rl.rollout.engine import Engine, Logged, unlogged
from holdfast.adapters.rl.rollout.voices import replied
from holdfast.adapters.rl.samples.tokens import Tokenizer
from holdfast.adapters.rl.samples.trajectory import Delta, SampleId, Trajectory

_PAUSE_S = 0.02


class Episodes:
    """Samples episodes; at most ``waiting`` wait for replies beside those in the engines' slots.

    ``engines`` are those of the policies, in their order, and ``names`` the policies' names.
    Waiting trajectories count as in progress: a pinned engine keeps its weights until they are
    over.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        calls: EnvironmentCalls,
        *,
        tokenizer: Tokenizer,
        waiting: int = 64,
        names: Sequence[str] = ("",),
    ) -> None:
        self._engines, self._first, self._names = engines, engines[0], names
        self._calls, self._tokenizer = calls, tokenizer
        self._slots = sum(engine.slots for engine in engines)
        self._most = self._slots + waiting
        self._waiting: dict[SampleId, Trajectory] = {}
        self._back: dict[SampleId, tuple[Trajectory, Logged]] = {}

    @property
    def pinned(self) -> bool:
        """True if weights change only when nothing is in progress."""
        return self._first.pinned

    @property
    def renewable(self) -> bool:
        """True if newer weights may be loaded while samples are in progress."""
        return not self.pinned

    @property
    def slots(self) -> int:
        """Number of sequences that the first policy samples at a time: episodes begin with it."""
        return self._first.slots

    @property
    def version(self) -> int | None:
        """Policy version of the weights; None before the first."""
        return self._first.version

    @property
    def generation(self) -> int:
        """Generation in which the weights were pulled."""
        return self._first.generation

    @property
    def free(self) -> int:
        """Number of trajectories that may still be put; a blank one gets a slot at once."""
        room = sum(engine.free for engine in self._engines)
        at_work = self._slots - room + len(self._waiting) + len(self._back)
        ahead = sum(self._speaks(each) is self._first for each, _ in self._back.values())
        return max(0, min(self._first.free - ahead, self._most - at_work))

    @property
    def idle(self) -> bool:
        """True if nothing is in progress or waits for a reply."""
        at_rest = all(engine.idle for engine in self._engines)
        return at_rest and not self._waiting and not self._back

    def load(self, weights: Mapping[str, Tensor], *, version: int, generation: int) -> None:
        """Load the weights of a policy version; samples in progress continue under them."""
        if self.pinned and not self.idle:
            raise RuntimeError(f"version {version} offered while version {self.version} is in use")
        for engine in self._engines:
            engine.load(weights, version=version, generation=generation)

    def unload(self) -> None:
        """Forget the weights and all unfinished samples."""
        for engine in self._engines:
            engine.unload()
        self._calls.drop({*self._waiting})
        self._waiting.clear()
        self._back.clear()

    def put(self, trajectory: Trajectory) -> None:
        """Start or continue an episode; one whose turn is over waits for its reply at once."""
        engine = self._speaks(trajectory)
        if engine.limits.turn_over(trajectory):
            self._submit(trajectory)
            engine.note(unlogged(trajectory, (0, 0)))
        elif engine.free:
            engine.put(trajectory)
        else:
            self._back[trajectory.key] = (trajectory, (0, 0))

    def running(self) -> list[Trajectory]:
        """Return the unfinished trajectories, as they are now."""
        back = [trajectory for trajectory, _ in self._back.values()]
        at_work = [each for engine in self._engines for each in engine.running()]
        return [*at_work, *self._waiting.values(), *back]

    def progress(self) -> dict[SampleId, int]:
        """Return how many tokens of each running trajectory were sampled."""
        back = {key: trajectory.sampled for key, (trajectory, _) in self._back.items()}
        waiting = {key: trajectory.sampled for key, trajectory in self._waiting.items()}
        found = waiting | back
        for engine in self._engines:
            found |= engine.progress()
        return found

    def oldest(self) -> dict[SampleId, int]:
        """Return the oldest version of each running trajectory's tokens, future ones included."""
        back = [trajectory for trajectory, _ in self._back.values()]
        found = {each.key: each.oldest or 0 for each in (*self._waiting.values(), *back)}
        for engine in self._engines:
            found |= engine.oldest()
        return found

    def drop(self, keys: set[SampleId]) -> None:
        """Stop working on these samples."""
        for engine in self._engines:
            engine.drop(keys)
        self._calls.drop(keys & self._waiting.keys())
        for key in keys:
            self._waiting.pop(key, None)
            self._back.pop(key, None)

    def tick(self) -> list[Trajectory]:
        """Take replies and feed one token per occupied slot; return the finished trajectories."""
        nothing_else = all(engine.idle for engine in self._engines) and not self._back
        finished = []
        for key, reply in self._calls.replies(_PAUSE_S if nothing_else else 0.0):
            trajectory = self._waiting.pop(key)
            found = self._replied(trajectory, reply)
            logged = (len(trajectory.tokens), len(trajectory.turns))
            if found.reward is None:
                self._back[key] = (found, logged)
            else:
                self._first.note(unlogged(found, logged))
                finished.append(found)
        for key, (back, logged) in [*self._back.items()]:
            if (engine := self._speaks(back)).free:
                del self._back[key]
                engine.put(back, logged=logged)
        for engine in self._engines:
            for trajectory in engine.tick():
                self._submit(trajectory)
        return finished

    def take_deltas(self) -> list[Delta]:
        """Return, once, everything new since the last call, for the worker's log."""
        deltas = [delta for engine in self._engines for delta in engine.take_deltas()]
        for key, (trajectory, logged) in self._back.items():
            whole = (len(trajectory.tokens), len(trajectory.turns))
            if logged != whole:
                deltas.append(unlogged(trajectory, logged))
                self._back[key] = (trajectory, whole)
        return deltas

    def _speaks(self, trajectory: Trajectory) -> Engine:
        """Return the engine of the policy that has the turn."""
        return self._engines[trajectory.speaker]

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
                speaker=self._names[trajectory.speaker],
            )
        )

    def _replied(self, trajectory: Trajectory, reply: Reply) -> Trajectory:
        if isinstance(reply, Failed):
            return trajectory.replied((), state=trajectory.state, reward=0.0, reason=reply.reason)
        return replied(
            trajectory,
            reply,
            self._tokenizer.encode(reply.text),
            names=self._names,
            context=self._first.limits.context,
        )
