"""Evaluation where an environment gives the rewards: held-out episodes are played.

Their noise is a hash of their ordinals, the same in every evaluation, so that two evaluations
differ by the weights alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.environments.base import Environment
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.environments.starting import start_calls
from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.rollout.episodes import Episodes
from holdfast.adapters.rl.rollout.speakers import engines_of
from holdfast.adapters.rl.samples.trajectory import Trajectory


class Player:
    """Plays one episode of each held-out prompt, in this process and with its own policies."""

    def __init__(
        self,
        config: RLConfig,
        policies: Mapping[str, Policy],
        environment: Environment,
        calls: EnvironmentConfig,
    ) -> None:
        self._config, self._environment = config, environment
        engines = engines_of(config, policies)
        pool = start_calls(
            calls, seed=config.task_seed, owner="an evaluation", environment=environment
        )
        self._episodes = Episodes(
            engines,
            pool,
            tokenizer=config.tokenizer,
            waiting=calls.waiting,
            names=[*policies],
        )

    def rewards(
        self, weights: Mapping[str, Tensor], ordinals: Sequence[int], *, check: Callable[[], None]
    ) -> list[float]:
        """Return each episode's reward with these whole weights; 0 for a prompt that does not fit.

        ``check`` is called before each token and may raise.
        """
        episodes, earned = self._episodes, dict.fromkeys(ordinals, 0.0)
        episodes.unload()
        episodes.load(weights, version=0, generation=0)
        waiting = deque(self._blank(ordinal) for ordinal in ordinals)
        while waiting or not episodes.idle:
            check()
            while waiting and episodes.free:
                blank = waiting.popleft()
                if len(blank.prompt) < self._config.model.context:
                    episodes.put(blank)
            for trajectory in episodes.tick():
                earned[trajectory.ordinal] = trajectory.reward or 0.0
        return [earned[ordinal] for ordinal in ordinals]

    def _blank(self, ordinal: int) -> Trajectory:
        prompt = self._config.tokenizer.encode(self._environment.prompt(ordinal))
        return Trajectory(ordinal=ordinal, sample=0, prompt=prompt)
