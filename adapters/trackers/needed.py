"""The packages of trackers, imported when a run first needs them."""

from __future__ import annotations

import importlib
from typing import Any

from holdfast.elastic.errors import ConfigError


def needed(module: str, *, tracker: str, extra: str) -> Any:
    """Import a module of a tracker's package. Raises ``ConfigError`` that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{tracker} ({error}): pip install 'holdfast[{extra}]'") from error
