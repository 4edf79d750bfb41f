"""A policy from a local directory: a causal language model of Hugging Face's transformers.

Nothing is ever downloaded. The directory holds the output of ``save_pretrained`` of a model and its
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.elastic.errors import ConfigError

try:
    import transformers
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ConfigError(
        "a pretrained model needs transformers: pip install 'holdfast[hf]'"
    ) from error


@dataclass(slots=True)
class _CachePlace:
    """The target of the next write: each slot at its position, or ``filled`` slots from 0 on."""

    positions: Tensor
    filled: Tensor | None = None


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer [slots, heads, context, head width].

    Every slot writes one token at its entry of ``place.positions``, or the ``place.filled`` slots
    write many tokens from their beginning on.
    """

    def __init__(self, place: _CachePlace, *, slots: int, context: int) -> None:
        super().__init__()
        self._place, self._slots, self._context = place, slots, context

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, width = key_states.shape
        size = (self._slots, heads, self._context)
        self.keys = key_states.new_zeros(*size, width)
        self.values = value_states.new_zeros(*size, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        place = self._place
        if place.filled is not None:
            length = key_states.shape[2]
            keys[place.filled, :, :length] = key_states
            values[place.filled, :, :length] = value_states
            return key_states, value_states
        slots = torch.arange(self._slots)
        keys[slots, :, place.positions] = key_states[:, :, 0]
        values[slots, :, place.positions] = value_states[:, :, 0]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._context, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._context


class _SlotCache(Cache):  # type: ignore[misc]
    """The caches of all layers, and the place of their next write."""

    def __init__(self, layers: int, *, slots: int, context: int) -> None:
        self.place = _CachePlace(torch.zeros(slots, dtype=torch.long))
        super().__init__(
            layers=[_SlotLayer(self.place, slots=slots, context=context) for _ in range(layers)]
        )


class Pretrained(Policy):
    """A model of transformers; ``context`` bounds prompt plus answer, in tokens."""

    def __init__(self, model: Any, *, context: int) -> None:
        super().__init__()
        self.lm, self._context = model, context

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [rows, length, vocabulary] of ``tokens`` [rows, length]."""
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False).logits
        return logits

    def new_cache(self, slots: int) -> _SlotCache:
        """Return an empty key-value cache for ``slots`` sequences."""
        return _SlotCache(len(self.layers()), slots=slots, context=self._context)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, slots: Tensor, cache: _SlotCache) -> None:
        """Feed ``tokens`` [rows, length] at once to ``slots`` [rows], each from its beginning."""
        rows, length = tokens.shape
        cache.place.filled = slots
        seen = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, -1, -1)
        self._cached(tokens, torch.arange(length).expand(rows, -1), seen, cache)

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: _SlotCache) -> Tensor:
        """Feed one token per slot (``tokens``, ``positions``: [slots]); return logits per slot."""
        cache.place.positions, cache.place.filled = positions, None
        seen = torch.arange(self._context)[None, :] <= positions[:, None]
        logits = self._cached(tokens[:, None], positions[:, None], seen[:, None], cache)
        return logits[:, 0]

    def _cached(self, tokens: Tensor, positions: Tensor, seen: Tensor, cache: _SlotCache) -> Tensor:
        """Return the logits of ``tokens`` [rows, length]; they attend to ``seen`` positions."""
        least = torch.finfo(self.lm.dtype).min
        logits: Tensor = self.lm(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=torch.where(seen, 0.0, least).to(self.lm.dtype)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits

    def layers(self) -> Sequence[nn.Module]:
        """Return the decoder layers, first to last."""
        lists = [[*part] for part in self.lm.modules() if isinstance(part, nn.ModuleList)]
        return max(lists, key=len)


class PretrainedTokenizer:
    """The tokenizer of a directory; see `holdfast.adapters.rl.samples.tokens.Tokenizer`."""

    def __init__(self, directory: str) -> None:
        self._tokenizer = loaded_from(directory, transformers.AutoTokenizer)
        self.size = len(self._tokenizer)
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"{directory}: the tokenizer has no end-of-sequence token; set one")
        self.end: int = self._tokenizer.eos_token_id

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The number of each token."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, without special ones."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def load_pretrained(directory: str, *, context: int) -> Pretrained:
    """Return the model in a directory, in the precision it was saved in.

    Raises ``ConfigError`` if there is none, or if it takes fewer tokens than ``context``.
    """
    model = loaded_from(directory, transformers.AutoModelForCausalLM, dtype="auto")
    room = getattr(model.config, "max_position_embeddings", context)
    if room < context:
        raise ConfigError(f"{directory}: the model takes {room} tokens, context is {context}")
    return Pretrained(model, context=context)


def loaded_from(directory: str, kind: Any, **options: Any) -> Any:
    """Return what a class of transformers loads from a local directory.

    Raises ``ConfigError`` if it is not there.
    """
    if not Path(directory).is_dir():
        raise ConfigError(f"{directory}: no such directory; save a model and its tokenizer there")
    transformers.utils.logging.disable_progress_bar()
    try:
        return kind.from_pretrained(directory, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: {error}") from error
