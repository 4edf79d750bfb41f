"""A tokenizer and texts for torchtitan's trainer, in the places of those in its repository."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
WORDS = ("steam", "engine", "wheel", "valve", "iron", "sand", "river", "bridge")
TEXTS = 200


def main() -> None:
    """Write ``tests/assets/tokenizer`` and ``tests/assets/c4_test`` below the argument."""
    assets = Path(sys.argv[1]) / "tests" / "assets"
    tokens, texts = assets / "tokenizer", assets / "c4_test"
    tokens.mkdir(parents=True)
    texts.mkdir()
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), BEGIN, END]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.save(str(tokens / "tokenizer.json"))
    known = {"bos_token": BEGIN, "eos_token": END}
    (tokens / "tokenizer_config.json").write_text(json.dumps(known))
    draw = random.Random(0)
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(8, 60))) for _ in range(TEXTS))
    (texts / "data.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))


if __name__ == "__main__":
    main()
