"""The rounds whose completions later steps need: tracked state, and a file in ``checkpoint-N``.

TRL's own checkpoints lack them, so that a run which goes on from one samples the rest of a round
anew, from other weights (https://github.com/huggingface/trl/issues/3148).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from holdfast.adapters.hf.grpo.finished import FinishedWork, writers_of
from holdfast.adapters.hf.grpo.shape import Epochs, RoundShape
from holdfast.ckpt import CorruptError
from holdfast.elastic import ConfigError

FILE: Final = "holdfast_rounds.safetensors"

Slice = dict[str, Any]
"""The input of a microbatch, as TRL buffers it: tensors, and lists of plain values."""


class BufferedRounds:
    """A Stateful with the slices of each open round, by the round's number in all epochs."""

    def __init__(self, shape: RoundShape, epochs: Epochs, finished: FinishedWork) -> None:
        self._shape, self._epochs, self._finished = shape, epochs, finished
        self._rounds: dict[int, list[Slice]] = {}

    def number(self, epoch: int, number: int) -> int:
        """Return the number of an epoch's round in all epochs."""
        return epoch * (self._epochs.microbatches // self._shape.length) + number

    def missing(self, step: int) -> list[tuple[int, int]]:
        """Return the epoch and the number in it of each round that a step needs and lacks."""
        epoch, microbatches = self._epochs.of_step(step)
        wanted = [(epoch, number) for number in self._shape.rounds_of(microbatches)]
        return [each for each in wanted if self.number(*each) not in self._rounds]

    def add(self, epoch: int, number: int, slices: list[Slice]) -> None:
        """Keep the slices of a round."""
        self._rounds[self.number(epoch, number)] = slices

    def at(self, epoch: int, microbatch: int) -> Slice:
        """Return the input of a microbatch of an epoch."""
        number, part = self._shape.slice_at(microbatch)
        return self._rounds[self.number(epoch, number)][part]

    def drop_spent(self, completed: int) -> None:
        """Drop the rounds that no step after the first ``completed`` needs."""
        epoch, microbatches = self._epochs.of_step(completed)
        first = self.number(epoch, self._shape.rounds_of(microbatches)[0])
        self._rounds = {number: each for number, each in self._rounds.items() if number >= first}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {
            "shape": dataclasses.asdict(self._shape),
            "rounds": {str(number): slices for number, slices in self._rounds.items()},
            "writers": [list(each) for each in self._finished.writers],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the saved rounds. Raises ``ConfigError`` if they were of another shape."""
        self._refuse_others(saved["shape"])
        self._rounds = {int(number): list(each) for number, each in saved["rounds"].items()}
        self._finished.inherit(writers_of(saved["writers"]))

    def save(self, folder: Path) -> None:
        """Write the file of a ``checkpoint-N``."""
        tensors, plain = dict[str, torch.Tensor](), dict[str, Any]()
        for number, slices in self._rounds.items():
            for part, found in enumerate(slices):
                for key, value in found.items():
                    name = f"{number}.{part}.{key}"
                    if isinstance(value, torch.Tensor):
                        tensors[name] = value.detach().cpu().contiguous()
                    else:
                        plain[name] = value
        told = {"shape": dataclasses.asdict(self._shape), "plain": plain}
        save_file(tensors, folder / FILE, metadata={"rounds": json.dumps(told)})

    def load(self, folder: Path, step: int) -> None:
        """Take the rounds of a ``checkpoint-N``, with which a run goes on after ``step`` steps.

        Raises ``ConfigError`` if a round is open there, and the checkpoint has nothing of it.
        """
        _, microbatches = self._epochs.of_step(step)
        path = folder / FILE
        if path.exists():
            self._read(path)
        elif self._shape.is_within(microbatches[0]):
            raise ConfigError(
                f"{folder} was saved in the middle of a round of completions and has none of them, "
                "as TRL's own checkpoints: resume from a checkpoint at the begin of a round, for "
                f"which steps x {self._shape.microbatches} is a multiple of {self._shape.length}, "
                "or from one that resilient_trainer saved"
            )

    def _read(self, path: Path) -> None:
        found: dict[int, dict[int, Slice]] = {}
        try:
            with safe_open(path, "pt") as file:
                told = json.loads(file.metadata()["rounds"])
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise CorruptError(f"{path}: no rounds of completions ({error})") from error
        self._refuse_others(told["shape"])
        for name, value in (values | told["plain"]).items():
            number, part, key = name.split(".", 2)
            found.setdefault(int(number), {}).setdefault(int(part), {})[key] = value
        self._rounds = {
            number: [slices[part] for part in sorted(slices)] for number, slices in found.items()
        }

    def _refuse_others(self, saved: dict[str, int]) -> None:
        present = dataclasses.asdict(self._shape)
        if saved != present and (changed := [k for k in present if saved.get(k) != present[k]]):
            told = ", ".join(f"{k} {saved.get(k)} (now {present[k]})" for k in changed)
            raise ConfigError(
                f"the rounds of completions were saved with other settings: {told}; go on with "
                "those with which the run began"
            )
