"""The adapter for Hugging Face's transformers and TRL: any supported Trainer with Holdfast's loop.

`resilient_trainer` gives a Trainer class the loop, `HoldfastArguments` its settings. See
docs/how-to/hf.md.
"""

from holdfast.elastic import ConfigError

try:
    import accelerate as _accelerate
    import transformers as _transformers
except ImportError as error:
    raise ConfigError(
        f"holdfast.adapters.hf needs transformers and accelerate ({error}): "
        "pip install 'holdfast[hf]', or 'holdfast[trl]' for the trainers of TRL"
    ) from error

from holdfast.adapters.hf.arguments import HoldfastArguments
from holdfast.adapters.hf.trainer import resilient_trainer

del _accelerate, _transformers

__all__ = ["HoldfastArguments", "resilient_trainer"]
