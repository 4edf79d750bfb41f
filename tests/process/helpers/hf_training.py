"""Train a tiny model of transformers: ``hf_training.py FOLDER [--kill STEP BEAT] …``.

With ``--fatal-batch N`` the worker ``trainer/1`` ends itself, once, when it evaluates its batch N.
``--compare`` takes transformers' own loop as well. The logs go to ``log.jsonl``, the end to
``end.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_loop import die_at
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import holdfast
from holdfast.adapters.hf import HoldfastArguments, resilient_trainer
from holdfast.elastic.channel.connecting import connect

WORDS = 64


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, of which different numbers are labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, WORDS, (12,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 7] = -100
        return {"input_ids": tokens, "labels": labels}


class Lines(TrainerCallback):  # type: ignore[misc]
    """Append each log, without times, to a file; a log that comes twice is there twice."""

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Append a line."""
        with Path("log.jsonl").open("a") as file:
            file.write(json.dumps([state.global_step, timeless(given["logs"])]) + "\n")


def timeless(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs without those that are times or speeds."""
    times = ("runtime", "per_second", "step_time")
    return {k: v for k, v in logs.items() if not any(each in k for each in times)}


def measured(found: EvalPrediction) -> dict[str, float]:
    """Return metrics in which every prediction, label, loss and input has its place."""
    guessed = found.predictions[:, :-1] == found.label_ids[:, 1:]
    order = np.arange(1, 1 + found.inputs.size)
    return {
        "accuracy": guessed.mean().item(),
        "inputs": float((found.inputs.reshape(-1) * order).sum()),
        "losses": float(found.losses @ order[: found.losses.size]),
    }


class BestWords:
    """Return the word with the highest logit at each position; a batch may be the last."""

    def __init__(self, fatal: int | None, marker: Path) -> None:
        self._fatal, self._marker, self._seen = fatal, marker, 0

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return them."""
        self._seen += 1
        is_last = self._seen == self._fatal and not self._marker.exists()
        if is_last and connect().seat == "trainer/1":
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return logits.argmax(-1)


def arguments(steps: int, *, own: bool, fsdp: bool = False) -> TrainingArguments:
    """Return arguments with accumulation, clipping, warm-up, evaluation and the best model."""
    more: dict[str, Any] = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 2,
        "include_for_metrics": ["inputs", "loss"],
        "save_steps": 3,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    return TrainingArguments(
        "out",
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=2,
        include_num_input_tokens_seen="all",
        train_sampling_strategy="sequential" if own else "random",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        fsdp=fsdp,
        **({"save_strategy": "no"} if own else more),
    )


def main() -> None:
    """Train in the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--exact")
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--resume")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--fatal-batch", type=int)
    parser.add_argument("--kill", type=int, nargs=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(given.folder)
    if given.kill:
        die_at(*given.kill, marker=given.folder / "died")
    if given.compare:
        compare(given.steps)
        return
    trainer = resilient_trainer(Trainer)(
        model=model(dropout=0.1),
        args=arguments(given.steps, own=False, fsdp=given.fsdp),
        train_dataset=Rows(38),
        eval_dataset=Rows(7),
        compute_metrics=measured,
        preprocess_logits_for_metrics=BestWords(given.fatal_batch, given.folder / "died"),
        callbacks=[Lines(), EarlyStoppingCallback(given.patience, early_stopping_threshold=10.0)],
        holdfast=HoldfastArguments(exact=given.exact),
    )
    found = trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model("final")
    if trainer.is_world_process_zero():
        loader = trainer.get_eval_dataloader()
        told = {
            "evaluated": trainer.evaluation_loop(loader, "by the Trainer itself").metrics,
            "hash": holdfast.state_hash(trainer.model.state_dict()),
            "step": found.global_step,
            "loss": found.training_loss,
            "flos": trainer.state.total_flos,
            "best": trainer.state.best_model_checkpoint,
            "history": [timeless(each) for each in trainer.state.log_history],
        }
        Path("end.json").write_text(json.dumps(told))


def model(*, dropout: float) -> LlamaForCausalLM:
    """Return a tiny model, the same each time."""
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=WORDS, num_attention_heads=4, attention_dropout=dropout, **shape
    )
    return LlamaForCausalLM(config)


def compare(steps: int) -> None:
    """Train by both loops on the same samples, without dropout; write the logs of both."""
    told = []
    for kind in (Trainer, resilient_trainer(Trainer)):
        trainer = kind(
            model=model(dropout=0.0),
            args=arguments(steps, own=True),
            train_dataset=Rows(38),
        )
        trainer.train()
        told.append([timeless(each) for each in trainer.state.log_history])
    Path("end.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
