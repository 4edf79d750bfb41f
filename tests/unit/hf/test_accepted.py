"""Trainers and training arguments that are supported, and refusals of all others by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate")


def arguments(**given: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments("out", use_cpu=True, report_to=[], **given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bf16": True, "max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": 8},
        {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 5},
        {"train_sampling_strategy": "group_by_length", "save_strategy": "no"},
        {"ddp_find_unused_parameters": False},
    ],
)
def test_supported_arguments_are_accepted(given: dict[str, Any]) -> None:
    from transformers import Trainer

    from holdfast.adapters.hf.accepted import check_arguments

    check_arguments(arguments(**given), Trainer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_seed": 3}, r"TrainingArguments\(data_seed=3\).*set seed"),
        ({"dataloader_drop_last": True}, "the last step of an epoch has the rest"),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        ({"eval_on_start": True, "eval_strategy": "steps"}, r"trainer.evaluate\(\) before"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0.* leave it out"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config=Acc.*leave it"),
        ({"optim": "adafactor"}, "optim='adafactor' is not supported.*adamw_torch"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, "lr_scheduler_type='greedy'"),
        ({"train_sampling_strategy": "batch_rebalance"}, "give one of group_by_length, random"),
    ],
)
def test_any_other_argument_is_refused_with_a_remedy(given: dict[str, Any], said: str) -> None:
    from transformers import Trainer

    from holdfast.adapters.hf.accepted import check_arguments
    from holdfast.elastic import ConfigError

    with pytest.raises(ConfigError, match=said):
        check_arguments(arguments(**given), Trainer)


def test_trainers_whose_loop_is_another_are_refused_by_name() -> None:
    from transformers import Seq2SeqTrainer, Trainer

    from holdfast.adapters.hf.accepted import check_class
    from holdfast.elastic import ConfigError

    class OwnEpochs(Trainer):  # type: ignore[misc]
        def _run_epoch(self, **_: Any) -> None: ...

    class OwnLoss(Trainer):  # type: ignore[misc]
        def compute_loss(self, *_: Any, **__: Any) -> None: ...

    for kind, said in (
        (Seq2SeqTrainer, "Seq2SeqTrainer is not supported yet; supported are Trainer, SFTTrainer"),
        (OwnEpochs, "OwnEpochs has a _run_epoch of its own.*training_step"),
        (dict, r"resilient_trainer\(dict\): give transformers.Trainer"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_class(kind)
    check_class(OwnLoss)
    check_class(Trainer)


def test_the_settings_are_read_from_the_command_line_beside_the_trainers() -> None:
    from transformers import HfArgumentParser, TrainingArguments

    from holdfast.adapters.hf import HoldfastArguments

    parser = HfArgumentParser((TrainingArguments, HoldfastArguments))
    words = ["--output_dir", "x", "--exact", "int64", "--parity", "2", "--microbatches", "8"]
    _, ours = parser.parse_args_into_dataclasses([*words, "--use_cpu", "--checkpoint", "runs/x"])
    assert ours == HoldfastArguments(exact="int64", parity=2, microbatches=8, checkpoint="runs/x")
    made = ours.settings(accumulation=4, size=2, seed=7)
    assert (made["batch"].microbatches, made["batch"].size, made["seed"]) == (8, 2, 7)
    assert (made["exact"], made["snapshots"].parity, made["checkpoint"].root) == (
        "int64",
        2,
        "runs/x",
    )
    assert HoldfastArguments().settings(accumulation=4, size=2, seed=7)["checkpoint"] is None
    for said, meant in {"true": True, "none": None, "float32": "float32"}.items():
        (ours,) = HfArgumentParser(HoldfastArguments).parse_args_into_dataclasses(["--exact", said])
        assert ours.settings(accumulation=4, size=2, seed=7)["exact"] == meant


def test_every_listed_field_exists() -> None:
    from transformers import TrainingArguments

    from holdfast.adapters.hf.accepted import _COMMON, _REMEDIES, _VALUES

    known = {each.name for each in fields(TrainingArguments)}
    assert _COMMON | set(_VALUES) <= known
    assert set(_REMEDIES) - known == {"activation_offloading"}, "a field of TRL's"


def test_fields_that_the_script_adds_are_its_own_affair() -> None:
    from transformers import Trainer, TrainingArguments

    from holdfast.adapters.hf.accepted import check_arguments
    from holdfast.elastic import ConfigError

    @dataclass
    class MoreArguments(TrainingArguments):  # type: ignore[misc]
        temperature: float = 1.0

    made: dict[str, Any] = {"output_dir": "out", "use_cpu": True, "report_to": []}
    check_arguments(MoreArguments(temperature=2.0, **made), Trainer)
    with pytest.raises(ConfigError, match=r"MoreArguments\(data_seed=2\)"):
        check_arguments(MoreArguments(data_seed=2, **made), Trainer)
