"""Sampling of the ledger's answers from the Trainer's own model, by the rollout engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from holdfast.adapters.rl.policy.pretrained import Pretrained
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.sample import Sample


class _Tempered(Pretrained):
    """A model whose logits are divided by TRL's ``temperature``, as where it trains."""

    def __init__(self, model: Any, *, context: int, temperature: float) -> None:
        super().__init__(model, context=context)
        self._temperature = temperature

    def decode(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the divided logits per slot, as float32."""
        return super().decode(tokens, positions, cache).float() / self._temperature


def sample_from_model(
    answers: Sequence[Sample], trainer: Any, *, sink: Any, slots: int, context: int
) -> None:
    """Finish ``answers``, which the ``sink`` takes (see `SampleSink`), ``slots`` at a time.

    A token's bits depend on ``slots`` and ``context``, the room for prompt and answer, and on the
    tokens before it: not on its neighbours, nor on interruptions.
    """
    model = trainer.model
    policy = _Tempered(model, context=context, temperature=trainer.temperature)
    was_training = model.training
    engine = Engine(
        policy=policy,
        limits=sink.limits,
        slots=slots,
        seed=sink.seed,
        generation=sink.generation,
        version=answers[0].version,
    )
    open_ = {(each.ordinal, each.sample): each for each in answers}
    waiting = deque(answers)
    try:
        while waiting or not engine.idle:
            while waiting and engine.free:
                start = waiting.popleft().trajectory()
                engine.put(start, logged=(len(start.tokens), 0))
            engine.tick()
            for delta in engine.take_deltas():
                open_[delta.ordinal, delta.sample].extend(delta.tokens, delta.logprobs)
    finally:
        model.train(was_training)
