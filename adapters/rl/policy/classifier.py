"""A classifier of texts from a local directory: a reward model, as environments ask it."""

from __future__ import annotations

import inspect
import json
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from holdfast.adapters.rl.policy.pretrained import loaded_from
from holdfast.elastic.errors import ConfigError, JobFailedError

_OF_THE_PLACE: Final = ("_name_or_path", "transformers_version")


class Classifier:
    """The frozen classifier ``name`` in a directory; several threads may ask it at once.

    The directory holds the output of ``save_pretrained`` of a model for the classification of
    sequences, as transformers has them, and of its own tokenizer. A reward model is one with a
    single class. Its answer depends on its arguments and weights alone, bit for bit. Raises
    ``ConfigError`` if there is no such model, or if the directory lacks some of its weights, as
    that of a language model lacks the head.
    """

    def __init__(self, name: str, directory: str) -> None:
        self.name = name
        self._tokenizer = loaded_from(directory, transformers.AutoTokenizer)
        kind = transformers.AutoModelForSequenceClassification
        model, info = loaded_from(directory, kind, dtype="auto", output_loading_info=True)
        if missing := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
            raise ConfigError(
                f"classifiers: {directory} has no weights for {', '.join(missing[:3])}: give a "
                "model that was trained to classify texts, such as a reward model"
            )
        self._model = model.eval().requires_grad_(False)
        self._takes = inspect.signature(model.forward).parameters
        room = getattr(model.config, "max_position_embeddings", None)
        self._room = min(room or self._tokenizer.model_max_length, self._tokenizer.model_max_length)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their scores."""
        names: dict[int, str] = self._model.config.id2label
        return [names[number] for number in sorted(names)]

    @torch.no_grad()
    def scores(self, text: str, answer: str | None = None) -> list[float]:
        """Return the score of each class for a text, or for a pair: its logits, before a softmax.

        Tokens are those of the classifier's own tokenizer, special ones included. Raises
        ``JobFailedError`` for a text without tokens, and for more than the model takes.
        """
        row: dict[str, Tensor] = self._tokenizer(text, answer, return_tensors="pt")
        count = row["input_ids"].shape[1]
        if not 0 < count <= self._room:
            raise JobFailedError(
                f"classifier {self.name} was asked for a text of {count} tokens: give it 1 to "
                f"{self._room}"
            )
        given = {name: each for name, each in row.items() if name in self._takes}
        try:
            found: list[float] = self._model(**given).logits[0].float().tolist()
        except (IndexError, RuntimeError) as error:  # RoBERTa has fewer places than positions
            raise JobFailedError(
                f"classifier {self.name} cannot score a text of {count} tokens: {error}; give it "
                "fewer"
            ) from error
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return all that its scores depend on: its weights, and a description as bytes."""
        described = json.dumps([self._settings(), self._vocabulary()], sort_keys=True, default=str)
        return {
            **dict(self._model.named_parameters()),
            **dict(self._model.named_buffers()),
            "description": torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8),
        }

    def _settings(self) -> dict[str, Any]:
        found = self._model.config.to_dict()
        return {name: each for name, each in found.items() if name not in _OF_THE_PLACE}

    def _vocabulary(self) -> Any:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return self._tokenizer.get_vocab() if backend is None else backend.to_str()
