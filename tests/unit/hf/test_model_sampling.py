"""The Trainer's model samples answers whose bits depend on nothing but what stands before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_packages import needs

from holdfast.adapters.rl.samples.sample import Sample, SampleSink
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory, TurnLimits

pytestmark = needs("transformers")

LIMITS = TurnLimits(end=1, context=1 << 30, max_new_tokens=6)


class Sink(SampleSink):
    """Keeps the tokens that are added, and stops after ``most``."""

    limits, seed, generation = LIMITS, 11, 1

    def __init__(self, most: int = 1000) -> None:
        self.count, self._most = 0, most

    def added(self, sample: Sample, delta: Delta) -> None:
        self.count += len(delta.tokens)
        if self.count >= self._most:
            raise InterruptedError


def trainer_of(temperature: float = 1.0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return SimpleNamespace(model=LlamaForCausalLM(config).train(), temperature=temperature)


def starts() -> list[Trajectory]:
    return [Trajectory(ordinal=n, sample=0, prompt=tuple(range(2, 4 + n % 3))) for n in range(5)]


def sampled(trainer: Any, sink: Sink, begun: list[Trajectory], slots: int = 2) -> list[Trajectory]:
    from holdfast.adapters.hf.model_sampling import sample_from_model

    answers = [Sample(sink, each, version=4) for each in begun]
    try:
        sample_from_model(
            [each for each in answers if not each.finished],
            trainer,
            sink=sink,
            slots=slots,
            context=12,
        )
    except InterruptedError:
        assert trainer.model.training
    return [each.trajectory() for each in answers]


def test_answers_go_on_after_an_interruption_with_the_same_bits() -> None:
    trainer = trainer_of()
    whole = sampled(trainer, Sink(), starts())
    assert all(LIMITS.finished(each) for each in whole)
    part = sampled(trainer, Sink(most=9), starts())
    assert sum(map(LIMITS.finished, part)) < len(part)
    assert sampled(trainer, Sink(), part) == whole
    assert trainer.model.training


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_are_those_of_the_divided_logits(temperature: float) -> None:
    trainer = trainer_of(temperature)
    for each in sampled(trainer, Sink(), starts()):
        ids = torch.tensor([[*each.prompt, *each.tokens]])
        with torch.no_grad():
            logits = trainer.model(ids).logits[0, len(each.prompt) - 1 : -1] / temperature
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(each.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(each.logprobs), wanted, atol=1e-5)
