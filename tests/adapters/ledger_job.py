"""A job of GRPO that samples from the ledger; one process kills itself at a moment of its choice.

python ledger_job.py FOLDER SETTINGS [--die MOMENT COUNT] [--seat SEAT] [--resume CHECKPOINT]
python ledger_job.py FOLDER --sample [--die MOMENT COUNT]

SETTINGS is JSON for GRPOConfig; ``by`` says who samples: the ``model``, a ``function`` or
``others``, which are processes with --sample. A moment is a call that comes for the COUNT-th time:
``token``, ``reward``, ``loss`` or ``step``. Every sampled token is a line of the file ``rolled``.
The logs go to ``log.jsonl``, the model to ``final``, the counts of the ledger to ``report.json``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from grpo_cases import digits, model, rows, tokenizer
from grpo_job import SETTINGS, Death, Lines, dying
from trl import GRPOConfig

from holdfast.adapters.hf import HoldfastArguments, ledger_rollouts, resilient_trainer
from holdfast.adapters.rl.sampler_process import Sampler
from holdfast.elastic.channel.connecting import connect
from holdfast.rl import Rollouts, Sample, attach


def count_tokens(death: Death) -> None:
    """Have every token of training written down, and die at one, perhaps."""
    extend = Sample.extend

    def counted(self: Sample, tokens: Any, logprobs: Any) -> None:
        at, given_up = len(self.tokens), self.given_up
        extend(self, tokens, logprobs)
        if given_up or not isinstance(self._keeper, Rollouts | Sampler):  # in an evaluation
            return
        lines = [f"{self.ordinal} {self.sample} {at + i} {t}\n" for i, t in enumerate(tokens)]
        with Path("rolled").open("a") as file:
            file.write("".join(lines))
        death.near("token")

    Sample.extend = counted  # type: ignore[method-assign]


def finish(policy: Any, answer: Sample) -> None:
    """Sample an answer token by token."""
    while not answer.finished:
        with torch.no_grad():
            table = policy(torch.tensor([answer.text])).logits[0, -1].float().log_softmax(-1)
        token = answer.draw(table)
        answer.extend([token], [float(table[token])])


def by_function(answers: Any, trainer: Any) -> None:
    """Sample all answers."""
    for answer in answers:
        finish(trainer.model, answer)


def sample_for_others() -> None:
    """Sample for a loop until it is over."""
    policy = model()
    with attach("meeting", policy.load_state_dict) as sampler:
        for answer in sampler.samples():
            finish(policy, answer)


def rewards_of(death: Death) -> Any:
    """Return a reward function."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        death.near("reward")
        return [each + float(torch.rand(1)) / 9 for each in digits(completions)]

    return reward


def main() -> None:
    """Train in the folder, or sample."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", type=json.loads, nargs="?")
    parser.add_argument("--die", nargs=2, action="append", default=[])
    parser.add_argument("--seat", default="trainer/0")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--resume")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(given.folder)
    at = {moment: int(count) for moment, count in given.die}
    if not given.sample and at and connect().seat != given.seat:
        at = {}
    death = Death(given.folder / "died", at)
    count_tokens(death)
    if given.sample:
        sample_for_others()
        return

    settings = {**SETTINGS, "max_steps": 4, **given.settings}
    by, held = settings.pop("by"), settings.pop("held", {})
    rollouts = {
        "model": lambda: ledger_rollouts(slots=3),
        "function": lambda: ledger_rollouts(by_function),
        "others": lambda: ledger_rollouts(directory="meeting"),
    }[by]()
    trainer = resilient_trainer(dying(death))(
        model=model(),
        args=GRPOConfig("out", **settings),
        train_dataset=rows(12),
        eval_dataset=rows(3),
        processing_class=tokenizer(),
        reward_funcs=rewards_of(death),
        rollout_func=rollouts,
        callbacks=[Lines(death)],
        holdfast=HoldfastArguments(**{"exact": "float32", **held}),
    )
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model("final")
    if trainer.is_world_process_zero():
        Path("report.json").write_text(json.dumps(rollouts.report()))


if __name__ == "__main__":
    main()
