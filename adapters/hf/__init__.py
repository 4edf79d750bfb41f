"""The adapter for Hugging Face's transformers and TRL: any supported Trainer with Holdfast's loop.

`resilient_trainer` gives a Trainer class the loop, `HoldfastArguments` its settings. See
docs/how-to/hf.md.
"""

from holdfast.adapters.hf.arguments import HoldfastArguments
from holdfast.adapters.hf.making import resilient_trainer

__all__ = ["HoldfastArguments", "resilient_trainer"]
