"""Small models of transformers' architectures, initialised at random."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Final

import torch

ARCHITECTURES = ("llama", "qwen3")
END = 127


@functools.cache
def saved(architecture: str) -> str:
    """Save a model and a tokenizer of single characters; return their directory."""
    import transformers

    shape = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": architecture == "qwen3",
        "eos_token_id": END,
    }
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config, model = kinds[architecture]
    directory = tempfile.mkdtemp(prefix=f"tiny-{architecture}-")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        made = model(config(**shape))
        for parameter in made.parameters():  # far from uniform, so that samples end and differ
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        made.save_pretrained(directory)
    _save_tokenizer(directory)
    assert (Path(directory) / "tokenizer.json").is_file()
    return directory


CLASSIFIER: Final[dict[str, int]] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
"""The sizes of a classifier in transformers' configurations."""


def save_classifier(directory: Path, *, classes: int = 1, seed: int = 11, shift: int = 0) -> str:
    """Save a classifier and its tokenizer of single characters, shifted; return the directory."""
    import transformers

    config = transformers.BertConfig(**CLASSIFIER, num_labels=classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.BertForSequenceClassification(config).save_pretrained(directory)
    _save_tokenizer(directory, shift=shift)
    return str(directory)


def _save_tokenizer(directory: str | Path, *, shift: int = 0) -> None:
    import tokenizers
    import transformers

    codes = [(code + shift) % END for code in range(END)]
    vocabulary = {chr(code): number for number, code in enumerate(codes)} | {"</s>": END}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    wrapped.save_pretrained(directory)
