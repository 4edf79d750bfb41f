"""A tiny Llama, which vLLM serves and a loop trains, and a larger one for figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.elastic.errors import ConfigError

END: Final = 10
VOCABULARY: Final = 128
LIMITS: Final = TurnLimits(end=END, context=96, max_new_tokens=48)


_TINY: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
_LARGER: Final = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "initializer_range": 0.02,
}


def tiny_llama(seed: int) -> Any:
    """Return a Llama of 0.1 M parameters with the weights that a seed makes.

    Its heads have 32 numbers, the fewest that vLLM takes on a CPU.
    """
    return _llama(_TINY, seed=seed)


def larger_llama(seed: int) -> Any:
    """Return a Llama of 134 M parameters with the weights that a seed makes."""
    return _llama(_LARGER, seed=seed)


def _llama(shape: Mapping[str, Any], *, seed: int) -> Any:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"a Llama needs transformers ({error}): pip install 'holdfast[hf]'"
        ) from error
    torch.manual_seed(seed)
    config = LlamaConfig(
        **shape,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).float()


def save_llama(folder: Path, *, make: Callable[[int], Any] = tiny_llama) -> Path:
    """Save the first version where servers read their model, if none did; return the place."""
    place, draft = folder / "llama", folder / f".llama-{os.getpid()}"
    if not place.exists():
        make(1).save_pretrained(draft)
        try:
            draft.rename(place)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return place


def prompt_of(ordinal: int) -> tuple[int, ...]:
    """Return the tokens of a prompt."""
    draw = torch.Generator().manual_seed(ordinal)
    found = torch.randint(END + 1, VOCABULARY, (4 + ordinal % 5,), generator=draw)
    return tuple(found.tolist())
