"""The adapter for Hugging Face's transformers and TRL: any supported Trainer with Holdfast's loop.

`resilient_trainer` gives a Trainer class the loop, `HoldfastArguments` its settings. GRPO samples
from the rollout ledger with `ledger_rollouts`. See docs/how-to/hf.md.
"""

from holdfast.adapters.hf.arguments import HoldfastArguments
from holdfast.adapters.hf.ledger_rollouts import ledger_rollouts
from holdfast.adapters.hf.making import resilient_trainer

__all__ = ["HoldfastArguments", "ledger_rollouts", "resilient_trainer"]
