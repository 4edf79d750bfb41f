"""The predicted outcome for the nodes that a run loses, as a file in that run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from holdfast.tools.chaos.judging.result import ResultError
from holdfast.tools.chaos.report.losses import Prediction

_FILE: Final = "predicted.json"


def save(folder: Path, prediction: Prediction) -> None:
    """Write a prediction into the folder of the run that tests it."""
    (folder / _FILE).write_bytes(msgspec.json.encode(prediction) + b"\n")


def load(folder: Path) -> Prediction | None:
    """Return the prediction in a run's folder, None if there is none.

    Raises ``ResultError`` for one that cannot be read.
    """
    path = folder / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Prediction)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ResultError(f"{path}: not a prediction: {error}") from error
