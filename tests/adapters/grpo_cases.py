"""GRPO in TRL's own loop and in Holdfast's, case by case, with the same completions.

python grpo_cases.py FOLDER CASES    CASES is JSON: {name: settings}; prints the logs as JSON
"""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from holdfast.adapters.hf import HoldfastArguments, resilient_trainer

LETTERS = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
MOST_TOKENS = 6


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters."""
    known = {letter: number for number, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def model() -> LlamaForCausalLM:
    """Return a tiny model without dropout, which was saved and loaded."""
    set_seed(0)
    ends = {"eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        **ends,
    )
    name = f"tiny-{os.getpid()}"
    LlamaForCausalLM(config).save_pretrained(name)
    return LlamaForCausalLM.from_pretrained(name)


def rows(count: int) -> Dataset:
    """Return prompts of several lengths."""
    return Dataset.from_dict({"prompt": [f"{i * i} plus {i} is " for i in range(count)]})


def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answer from the prompt, the place in its group and the step alone, so not from the weights.

    So both loops have the same completions, and their computations are compared.
    """
    known, seen = trainer.processing_class, dict[str, int]()
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
        seen[prompt] = place = seen.get(prompt, -1) + 1
        name = f"{prompt}/{place}/{trainer.state.global_step}"
        digest = sha256(name.encode()).digest()
        length = 1 + digest[0] % MOST_TOKENS
        tokens = [3 + byte % (len(LETTERS) - 3) for byte in digest[1 : 1 + length]]
        found["prompt_ids"].append(known(prompt)["input_ids"])
        found["completion_ids"].append(tokens if digest[-1] % 3 else [*tokens[:-1], 1])
        found["logprobs"].append([-1.0] * length)
    return found


def digits(completions: list[str], **_: Any) -> list[float]:
    """Reward digits."""
    return [sum(each.isdigit() for each in text) / 3 for text in completions]


def short(completions: list[str], log_metric: Any, **_: Any) -> list[float | None]:
    """Reward brevity, but not of every text."""
    log_metric("seen", sum(map(len, completions)) / len(completions))
    return [None if text.endswith("a") else 1.0 / (1 + len(text)) for text in completions]


def timeless(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs without those that are times, speeds or counts of operations."""
    times = ("runtime", "per_second", "step_time", "total_flos")
    return {k: v for k, v in logs.items() if not any(each in k for each in times)}


class Collected(TrainerCallback):  # type: ignore[misc]
    """Keeps the logs without times."""

    def __init__(self) -> None:
        self.logs: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep one."""
        self.logs.append([state.global_step, timeless(given["logs"])])


def trained(kind: Any, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Train; return the logs, and sums of the weights."""
    given = {
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
        "max_completion_length": MOST_TOKENS,
        "learning_rate": 0.5,
        "optim": "sgd",  # adamw makes a step of any rounding in a gradient that is nearly 0
        "bf16": False,  # its rounding depends on when a loss is divided
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **settings,
    }
    prompts, both = given.pop("prompts", 24), given.pop("both", False)
    lora = given.pop("lora", False)
    rollout = answers if given.pop("rolls", True) else None
    collected = Collected()
    trainer = kind(
        model=model(),
        args=GRPOConfig("out", **given),
        train_dataset=rows(prompts),
        processing_class=tokenizer(),
        reward_funcs=[digits, short] if both else digits,
        rollout_func=rollout,
        callbacks=[collected],
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
        **more,
    )
    trainer.train()
    weights = [float(p.detach().double().square().sum()) for p in trainer.model.parameters()]
    return {"logs": collected.logs, "weights": weights}


def dealt_alike(kind: type) -> type:
    """Return a Trainer that deals the completions of every round out in the same order."""

    class Dealt(kind):  # type: ignore[misc,valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            torch.manual_seed(7)  # the order is drawn next
            return found

    return Dealt


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Train every case in both loops and print the logs."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.chdir(folder)
    own, report = dealt_alike(GRPOTrainer), {}
    for name, settings in cases.items():
        report[name] = [
            trained(own, settings),
            trained(resilient_trainer(own), settings, holdfast=HoldfastArguments()),
        ]
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
