"""GRPO by microbatches: whole groups, one sampling for a step, losses over the tokens of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate")

SUMS = ((3.0, 2), (5.0, 7), (-4.0, 0))
"""For each microbatch the sum of its tokens' losses, and the number of its tokens."""


def trainer_of(**given: Any) -> Any:
    """Return what `sample_by_microbatch` reads of a GRPOTrainer."""
    args = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        generation_batch_size=8,
        max_completion_length=16,
    )
    found = SimpleNamespace(args=args, num_generations=2, loss_type="dapo", tools=None)
    found.environment_factories = None
    for name, value in given.items():
        setattr(args if hasattr(args, name) else found, name, value)
    return found


def test_each_microbatch_samples_for_itself() -> None:
    from holdfast.adapters.hf.grpo import sample_by_microbatch

    trainer = trainer_of()
    sample_by_microbatch(trainer)
    assert (trainer.args.steps_per_generation, trainer.args.generation_batch_size) == (1, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_generations": 3}, "size=4 is no multiple of num_generations=3.*whole groups"),
        ({"steps_per_generation": 4}, "steps_per_generation=4 differs.*several steps"),
        ({"loss_type": "new"}, "loss_type='new' is not supported.*bnpo, cispo"),
        ({"tools": [print]}, r"GRPOTrainer\(tools=...\) is not supported"),
        ({"environment_factories": {"a": dict}}, r"GRPOTrainer\(environment_factory=...\)"),
    ],
)
def test_what_cannot_be_done_by_microbatch_is_refused(given: dict[str, Any], said: str) -> None:
    from holdfast.adapters.hf.grpo import sample_by_microbatch
    from holdfast.elastic import ConfigError

    with pytest.raises(ConfigError, match=said):
        sample_by_microbatch(trainer_of(**given))


class OneRank:
    """A run of one rank; the gradient is the mean of the microbatches, as a run's is."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._losses: list[float] = []

    def microbatches(self, _: Any, *, weigh: Callable[[Any], float]) -> Iterator[Any]:
        yield from range(len(SUMS))
        self.metrics["loss"] = sum(self._losses) / len(SUMS)

    def log(self, *, loss: torch.Tensor, **_: float) -> None:
        self._losses.append(float(loss))

    def backward(self, loss: torch.Tensor) -> None:
        (loss / len(SUMS)).backward()

    def reduce(self, values: Sequence[Any], how: str) -> Any:
        assert how == "sum"
        assert len(values) == len(SUMS)
        return sum(values)


class OneWeight:
    """A trainer of one weight, whose losses are sums of tokens as TRL divides them."""

    def __init__(self, loss_type: str) -> None:
        self.args = trainer_of().args
        self.loss_type, self.model = loss_type, torch.nn.Linear(1, 1, bias=False)
        self.accelerator = SimpleNamespace(process_index=1, state=SimpleNamespace(process_index=1))
        self.state = SimpleNamespace(num_input_tokens_seen=0)
        self.compute_loss_func, self.current_flos = None, 0.0
        self._metrics = {"train": defaultdict[str, list[float]](list)}
        self.stood_at: list[int] = []

    def _get_num_items_in_batch(self, *_: Any) -> None:
        return None

    def floating_point_ops(self, _: Any) -> float:
        return 1.0

    def _track_num_input_tokens(self, _: Any) -> None: ...

    def _prepare_inputs(self, number: int) -> dict[str, torch.Tensor]:
        self.stood_at.append(self.accelerator.state.process_index)
        total, tokens = SUMS[number]
        self.state.num_input_tokens_seen += tokens
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        return {"sum": torch.tensor(total), "num_items_in_batch": torch.tensor(tokens)}

    def training_step(self, model: Any, inputs: int, _: Any) -> torch.Tensor:
        found = self._prepare_inputs(inputs)
        unit = found["num_items_in_batch"].clamp(min=1.0) if self.loss_type == "dapo" else 2.0
        loss = model.weight.sum() * found["sum"] / unit
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize(("loss_type", "slope"), [("dapo", 4 / 9), ("grpo", 4 / 2 / 3)])
def test_a_loss_over_tokens_is_divided_by_those_of_the_whole_step(
    loss_type: str, slope: float
) -> None:
    from accelerate import PartialState

    from holdfast.adapters.hf.grpo import MicrobatchesOfGrpo

    trainer: Any = OneWeight(loss_type)
    run: Any = OneRank()
    trainer.args.device = torch.device("cpu")
    before = PartialState().process_index
    loss = MicrobatchesOfGrpo(trainer, run, SimpleNamespace()).run_pass()  # type: ignore[arg-type]
    weight = trainer.model.weight
    assert weight.grad.item() == pytest.approx(slope)
    assert loss == pytest.approx(slope * weight.item())
    assert trainer.stood_at == [0, 0, 0], "TRL takes the rows of process 0"
    assert PartialState().process_index == 1
    PartialState().process_index = before
    assert trainer.state.num_input_tokens_seen == 9
    assert trainer._metrics["train"]["num_tokens"] == [9]
