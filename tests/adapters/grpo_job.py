"""A job of GRPO whose rank 1 kills itself once, at a moment of its choice.

python grpo_job.py FOLDER SETTINGS [--die MOMENT COUNT] [--resume CHECKPOINT]

SETTINGS is JSON for GRPOConfig. A moment is a call that comes for the COUNT-th time: ``rollout``,
``reward``, ``loss`` or ``step``. Every call of the rollout function that came to its end is a line
of the file ``rolled``; the logs go to ``log.jsonl``, the model to ``final``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from grpo_cases import digits, model, rows, timeless, tokenizer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from holdfast.adapters.hf import HoldfastArguments, resilient_trainer
from holdfast.elastic.channel.connecting import connect

SETTINGS: dict[str, Any] = {
    "logging_steps": 1,
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}
"""Arguments of GRPOConfig for a small job without saves."""


class Death:
    """Kills this process as a call begins; ``marker`` exists once one has died."""

    def __init__(self, marker: Path, at: dict[str, int]) -> None:
        self._marker, self._at, self._seen = marker, at, dict[str, int]()

    def near(self, moment: str) -> None:
        """Count a call."""
        self._seen[moment] = self._seen.get(moment, 0) + 1
        if self._seen[moment] == self._at.get(moment) and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Lines(TrainerCallback):  # type: ignore[misc]
    """Appends each log to a file, and dies at steps."""

    def __init__(self, death: Death) -> None:
        self._death = death

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Append a line."""
        with Path("log.jsonl").open("a") as file:
            file.write(json.dumps([state.global_step, timeless(given["logs"])]) + "\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Die, perhaps."""
        self._death.near("step")


def dying(death: Death) -> Any:
    """Return a class of trainers that die as they compute a loss, perhaps."""

    class Dying(GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            death.near("loss")
            return super().compute_loss(*args, **more)

    return Dying


def rolled_by(death: Death) -> Any:
    """Return a rollout function that samples from the model, token by token."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        death.near("rollout")
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            ids = trainer.processing_class(prompt)["input_ids"]
            tokens, logprobs = list[int](), list[float]()
            while len(tokens) < 6 and 1 not in tokens:
                with torch.no_grad():
                    table = trainer.model(torch.tensor([[*ids, *tokens]])).logits[0, -1]
                table = table.float().log_softmax(-1)
                tokens.append(int(table.exp().multinomial(1)))
                logprobs.append(float(table[tokens[-1]]))
            found["prompt_ids"].append(ids)
            found["completion_ids"].append(tokens)
            found["logprobs"].append(logprobs)
        found["env_mask"] = [[1] * len(each) for each in found["completion_ids"]]
        found["bonus"] = [torch.rand(2) for _ in prompts]
        with Path("rolled").open("a") as file:
            file.write(json.dumps([trainer.state.global_step, prompts]) + "\n")
        return found

    return rollout


def rewards_of(death: Death) -> Any:
    """Return a reward function that uses what the rollout function gave besides."""

    def reward(completions: list[str], **given: Any) -> list[float]:
        death.near("reward")
        more = given.get("bonus") or [torch.zeros(2)] * len(completions)
        return [a + float(b.sum()) / 9 for a, b in zip(digits(completions), more, strict=True)]

    return reward


def main() -> None:
    """Train in the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("--die", nargs=2, action="append", default=[])
    parser.add_argument("--resume")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(given.folder)
    at = {moment: int(count) for moment, count in given.die}
    death = Death(given.folder / "died", at if at and connect().seat == "trainer/1" else {})

    settings = {**SETTINGS, "max_steps": 6, **given.settings}
    rolls = settings.pop("rolls", True)
    trainer = resilient_trainer(dying(death))(
        model=model(),
        args=GRPOConfig("out", **settings),
        train_dataset=rows(24),
        processing_class=tokenizer(),
        reward_funcs=rewards_of(death),
        rollout_func=rolled_by(death) if rolls else None,
        callbacks=[Lines(death)],
        holdfast=HoldfastArguments(exact="float32"),
    )
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model("final")


if __name__ == "__main__":
    main()
