"""The rollout engine of this library as a sampling engine, in this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.adapters.rl.engines.protocol import SampledToken, TokenPlace, room
from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.trajectory import SampleId, Stamp, Trajectory, TurnLimits
from holdfast.elastic.errors import ConfigError


@dataclass(slots=True)
class _OpenAnswer:
    """The tokens of an answer that nobody has taken yet."""

    tokens: deque[SampledToken] = field(default_factory=deque)
    is_over: bool = False


class BuiltInEngine:
    """Samples from a ``policy``, ``slots`` answers at a time; whoever waits for a token computes.

    ``pinned``: weights change only while no answer is in progress. Then a token's bits do not
    depend on interruptions.
    """

    def __init__(
        self, policy: Policy, *, limits: TurnLimits, slots: int, pinned: bool = True
    ) -> None:
        self._engine = Engine(policy=policy, limits=limits, slots=slots, seed=0, pinned=pinned)
        self._turn = threading.Condition()
        self._streams: dict[SampleId, _OpenAnswer] = {}
        self._is_paused = False

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._engine.slots

    def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
        """Yield the tokens that follow ``ids`` (see `SamplingEngine`).

        It waits for a slot, and for the end of another stream of the same answer.
        """
        if not room(self._engine.limits, prompt=place.prompt, ids=ids):
            return
        stream = self._put(ids, place)
        try:
            while (token := self._next(stream)) is not None:
                yield token
        finally:
            with self._turn:
                self._engine.drop({place.key})
                del self._streams[place.key]
                self._turn.notify_all()

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Load the weights of a policy version.

        Raises ``ConfigError`` if the engine is pinned and answers are in progress.
        """
        with self._turn:
            engine = self._engine
            if engine.pinned and not engine.idle:
                raise ConfigError(
                    f"load(version={version}): {len(self._streams)} answers are in progress, and a "
                    "pinned engine samples each with one version: let them end, or close them"
                )
            engine.load(weights, version=version, generation=0)
            self._turn.notify_all()

    def pause(self) -> None:
        """Sample no token until `resume`."""
        with self._turn:
            self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._turn:
            self._is_paused = False
            self._turn.notify_all()

    def _put(self, ids: Sequence[int], place: TokenPlace) -> _OpenAnswer:
        engine, answer = self._engine, tuple(ids[place.prompt :])
        with self._turn:
            if engine.version is None:
                raise ConfigError("the engine has no weights: load a policy version first")
            if self._streams and place.seed != engine.seed:
                raise ConfigError(
                    f"seed {place.seed} for an answer beside others of seed {engine.seed}: sample "
                    "those of one run at a time"
                )
            self._turn.wait_for(
                lambda: engine.free and place.key not in self._streams and not self._is_paused
            )
            stream = self._streams[place.key] = _OpenAnswer()
            engine.seed = place.seed
            # The engine returns new tokens only, so these need no numbers of their own.
            begun = Trajectory(
                ordinal=place.ordinal,
                sample=place.sample,
                prompt=tuple(ids[: place.prompt]),
                tokens=answer,
                logprobs=(0.0,) * len(answer),
                stamps=(Stamp(generation=0, version=engine.version, count=len(answer)),),
            )
            engine.put(begun, logged=(len(answer), 0))
        return stream

    def _next(self, stream: _OpenAnswer) -> SampledToken | None:
        """Return the next token of a stream, None at its end; feed the engine until it is there."""
        with self._turn:
            while not stream.tokens:
                if stream.is_over:
                    return None
                self._turn.wait_for(lambda: not self._is_paused)
                if not stream.tokens and not stream.is_over:
                    self._tick()
            return stream.tokens.popleft()

    def _tick(self) -> None:
        ended = {each.key for each in self._engine.tick()}
        for delta in self._engine.take_deltas():
            stream = self._streams[delta.ordinal, delta.sample]
            versions = [stamp.version for stamp in delta.stamps for _ in range(stamp.count)]
            pairs = zip(delta.tokens, delta.logprobs, versions, strict=True)
            stream.tokens.extend(SampledToken(*each) for each in pairs)
        for key in ended:
            self._streams[key].is_over = True
        if ended:
            self._turn.notify_all()
