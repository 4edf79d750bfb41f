"""Prompts, rewards, and the evaluation of a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast import elastic
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.environments.base import HELD_OUT
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.environments.starting import start_environment
from holdfast.adapters.rl.environments.task import Problem, make_task
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.policy import full_tensors, reshard
from holdfast.adapters.rl.policy.team import joined
from holdfast.adapters.rl.rollout.speakers import judges_of
from holdfast.adapters.rl.samples.tokens import Tokenizer
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.training.held_out_episodes import Player
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.elastic.events import EpisodesPlayed

Modules: TypeAlias = Mapping[str, nn.Module]
Weights: TypeAlias = Mapping[str, Tensor]
Figures: TypeAlias = dict[str, float]


class Assessment(Protocol):
    """The trainer's source of prompts and rewards."""

    def prompt(self, ordinal: int) -> str:
        """Return the prompt of a training ordinal."""

    def reward(self, sample: Trajectory) -> float:
        """Return the reward of a finished sample."""

    def evaluate(self, run: elastic.Run, policies: Modules, elsewhere: Weights) -> Figures:
        """Return shares or mean rewards on held-out prompts, by name; collective.

        ``elsewhere`` has the whole weights of policies that other runs train, by their names in the
        module of all.
        """


def make_assessment(config: RLConfig, policies: Policies) -> Assessment:
    """Return the assessment of the job's environment, or of its task if it has none."""
    if config.environment is None:
        return TaskAssessment(config)
    return EpisodeAssessment(config, config.environment, policies)


class TaskAssessment:
    """Prompts and rewards of a task; evaluation uses its right answers."""

    def __init__(self, config: RLConfig) -> None:
        self._tokenizer = config.tokenizer
        self._task = make_task(config.task, seed=config.task_seed, exact_weight=config.exact_weight)
        self._held_out = HeldOut.of(
            self._task.held_out(config.held_out),
            tokenizer=config.tokenizer,
            length=config.model.context,
        )

    def prompt(self, ordinal: int) -> str:
        """See `Assessment.prompt`."""
        return self._task.problem(ordinal).prompt

    def reward(self, sample: Trajectory) -> float:
        """See `Assessment.reward`."""
        tokenizer, tokens = self._tokenizer, sample.tokens
        ended = tokens[-1] == tokenizer.end
        text = tokenizer.decode(tokens[:-1] if ended else tokens)
        return self._task.reward(sample.ordinal, text, ended=ended)

    def evaluate(self, run: elastic.Run, policies: Modules, elsewhere: Weights) -> Figures:
        """Return the first policy's shares of right answers, sampled and greedy; collective."""
        model, data = next(iter(policies.values())), run.data_mesh

        def sum_(counts: Tensor) -> None:
            reshard(model)
            dist.all_reduce(counts, group=data.get_group())

        return self.shares(model, rank=data.get_local_rank(), ranks=data.size(), sum_=sum_)

    def shares(
        self,
        model: nn.Module,
        *,
        rank: int = 0,
        ranks: int = 1,
        sum_: Callable[[Tensor], None] = lambda _: None,
    ) -> dict[str, float]:
        """Return the same shares; ``sum_`` adds a tensor up over the ranks in place."""
        parts = self._held_out.parts()
        counts = torch.zeros(2, dtype=torch.float64)
        for part in parts[rank::ranks]:
            counts += exact_matches(model, part)
        if rank >= len(parts):
            exact_matches(model, parts[0])  # a forward pass is collective
        sum_(counts)
        shares = (counts / len(self._held_out.tokens)).tolist()
        expected, greedy = (round(share, 6) for share in shares)
        return {"held_out": expected, "greedy": greedy}


class EpisodeAssessment:
    """Prompts of an environment, which also gives the rewards; held-out episodes are played."""

    def __init__(self, config: RLConfig, chosen: EnvironmentConfig, policies: Policies) -> None:
        made = policies.each()
        self._environment = start_environment(
            chosen,
            seed=config.task_seed,
            owner="a trainer",
            frozen_policies={**judges_of(config, made), **policies.classifiers},
        )
        self._player = Player(config, made, self._environment, chosen)
        self._count = config.held_out

    def prompt(self, ordinal: int) -> str:
        """See `Assessment.prompt`."""
        return self._environment.prompt(ordinal)

    def reward(self, sample: Trajectory) -> float:
        """See `Assessment.reward`."""
        assert sample.reward is not None, "an episode that is over"
        return sample.reward

    def evaluate(self, run: elastic.Run, policies: Modules, elsewhere: Weights) -> Figures:
        """Return the mean reward of the held-out episodes; collective."""
        weights, data = full_tensors(joined(policies)) | dict(elsewhere), run.data_mesh
        own = range(data.get_local_rank(), self._count, data.size())
        earned = torch.zeros(self._count, dtype=torch.float64)
        with run.pause():
            found = self._player.rewards(
                weights, [HELD_OUT + number for number in own], check=run.check
            )
            earned[list(own)] = torch.tensor(found, dtype=torch.float64)
            dist.all_reduce(earned, group=data.get_group())
        return {"held_out": round(earned.mean().item(), 6)}


def episode_figures(samples: Sequence[Trajectory], *, step: int) -> EpisodesPlayed:
    """Return figures of a step's episodes.

    ``cut_short`` counts the episodes that something other than the environment ended.
    """
    turns = [len(sample.turns) for sample in samples]
    return EpisodesPlayed(
        step=step,
        turns_mean=sum(turns) / len(turns),
        turns_most=max(turns),
        observed_tokens=sum(len(sample.tokens) - sample.sampled for sample in samples),
        cut_short=sum(bool(sample.reason) for sample in samples),
    )


_PART_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Problems as padded tensors: tokens [rows, length], answer mask [rows, length - 1].

    They come in parts of one shape, so that the outcome does not depend on how many ranks share
    the parts.
    """

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, problems: Sequence[Problem], *, tokenizer: Tokenizer, length: int) -> HeldOut:
        """Lay out problems with their right answers."""
        tokens = torch.zeros(len(problems), length, dtype=torch.long)
        mask = torch.zeros(len(problems), length - 1, dtype=torch.bool)
        for row, problem in enumerate(problems):
            prompt, answer = map(tokenizer.encode, (problem.prompt, problem.answer))
            text = (*prompt, *answer, tokenizer.end)
            tokens[row, : len(text)] = torch.tensor(text)
            mask[row, len(prompt) - 1 : len(text) - 1] = True
        return cls(tokens=tokens, mask=mask)

    def parts(self) -> list[HeldOut]:
        """Return the problems in parts of a fixed size, the unit of work of an evaluation."""
        tokens, masks = torch.split(self.tokens, _PART_ROWS), torch.split(self.mask, _PART_ROWS)
        return [HeldOut(tokens=t, mask=m) for t, m in zip(tokens, masks, strict=True)]


@torch.no_grad()
def exact_matches(model: nn.Module, problems: HeldOut) -> Tensor:
    """Return [expected number of right sampled answers, right greedy answers], float64 [2].

    One teacher-forced pass over the right answers gives both, without sampling noise: a greedy
    answer is right exactly when every token of the right answer is the most likely one after the
    tokens before it; a sampled answer is right with the product of their probabilities.
    """
    logits = model(problems.tokens)
    greedy = logits[:, :-1].argmax(-1) == problems.tokens[:, 1:]
    right = (greedy | ~problems.mask).all(1).double().sum()
    logprobs = target_logprobs(logits, problems.tokens).double()
    expected = (logprobs * problems.mask).sum(1).exp().sum()
    return torch.stack([expected, right])
