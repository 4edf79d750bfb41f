"""`resilient_trainer`, which imports transformers and accelerate when it is called."""

from __future__ import annotations

from typing import Any

from holdfast.adapters.hf.accepted import check_class
from holdfast.elastic import ConfigError


def resilient_trainer(kind: type) -> Any:
    """Return ``kind``, a Trainer class, with Holdfast's loop in place of its own.

    The class takes one argument more, ``holdfast=HoldfastArguments(...)``. Its ``train`` is entered
    again after every change of the ranks, with the model that is there, and goes on from the newest
    complete step. Raises ``ConfigError`` for a Trainer whose loop is not supported yet, and, when
    an object of the class is made, for such training arguments.
    """
    try:
        from holdfast.adapters.hf.trainer import made_resilient
    except ImportError as error:
        raise ConfigError(
            f"resilient_trainer needs transformers and accelerate ({error}): "
            "pip install 'holdfast[hf]', or 'holdfast[trl]' for the trainers of TRL"
        ) from error
    check_class(kind)
    return made_resilient(kind)
