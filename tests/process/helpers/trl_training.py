"""Train a tiny model with TRL: ``trl_training.py FOLDER sft|dpo|grpo [--lora] [--fsdp] …``.

The logs go to ``log.jsonl`` and to TensorBoard, the model to ``final``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hf_training import Lines
from peft import LoraConfig
from run_loop import die_at
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    SFTTrainer,
)

from holdfast.adapters.hf import HoldfastArguments, resilient_trainer

KINDS = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
}
LETTERS = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters."""
    known = {letter: number for number, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def model() -> LlamaForCausalLM:
    """Return a tiny model that was saved and loaded, which DPO's reference model needs."""
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    ends = {"eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(LETTERS), num_attention_heads=4, attention_dropout=0.1, **shape, **ends
    )
    LlamaForCausalLM(config).save_pretrained(f"tiny-{os.getpid()}")
    return LlamaForCausalLM.from_pretrained(f"tiny-{os.getpid()}")


def rows(kind: str) -> Dataset:
    """Return sums in words, as texts or as preferences."""
    numbers = range(48)
    if kind == "sft":
        return Dataset.from_dict({"text": [f"{i} plus {i} is {2 * i}" for i in numbers]})
    if kind == "grpo":
        return Dataset.from_dict({"prompt": [f"{i} plus {i} is " for i in numbers]})
    return Dataset.from_dict(
        {
            "prompt": [f"{i} plus {i} is " for i in numbers],
            "chosen": [str(2 * i) for i in numbers],
            "rejected": [str(i) for i in numbers],
        }
    )


def digits(completions: list[str], **_: Any) -> list[float]:
    """Reward digits."""
    return [sum(each.isdigit() for each in text) / 3 for text in completions]


def main() -> None:
    """Train in the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--loss", default="dapo")
    parser.add_argument("--kill", type=int, nargs=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(given.folder)
    if given.kill:
        die_at(*given.kill, marker=given.folder / "died")
    kind, config = KINDS[given.kind]
    options: dict[str, Any] = {
        "max_steps": 10,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "fsdp": given.fsdp,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "tensorboard",
        "disable_tqdm": True,
    }
    os.environ["TENSORBOARD_LOGGING_DIR"] = "board"
    others: dict[str, Any] = {}
    if given.kind == "grpo":
        options |= {"num_generations": 2, "beta": 0.1}
        options |= {"max_completion_length": 6, "loss_type": given.loss}
        others["reward_funcs"] = digits
    trainer = resilient_trainer(kind)(
        model=model(),
        args=config("out", **options),
        train_dataset=rows(given.kind),
        eval_dataset=rows(given.kind).select(range(6)),
        processing_class=tokenizer(),
        **others,
        callbacks=[Lines()],
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if given.lora else None,
        holdfast=HoldfastArguments(exact="float32", rebuild_frozen=given.lora),
    )
    trainer.train()
    trainer.save_model("final")


if __name__ == "__main__":
    main()
