"""A tracker whose package is missing names the extra, when the first step comes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.adapters.trackers import MLflow, TensorBoard, WandB
from holdfast.elastic.errors import ConfigError


@pytest.mark.parametrize("extra", ["tensorboard", "wandb", "mlflow"])
def test_the_error_names_the_extra(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboard", "torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    made = {
        "tensorboard": lambda: TensorBoard(tmp_path),
        "wandb": lambda: WandB("project", run="first", directory=tmp_path),
        "mlflow": lambda: MLflow(tmp_path, run="first"),
    }[extra]()
    with pytest.raises(ConfigError, match=rf"pip install 'holdfast\[{extra}\]'"):
        made.begin()


def test_another_mode_of_wandb_is_refused() -> None:
    with pytest.raises(ConfigError, match="give 'offline' or 'online'"):
        WandB("project", run="first", directory=".", mode="disabled")
