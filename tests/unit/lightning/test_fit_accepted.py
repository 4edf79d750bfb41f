"""Options, hooks, callbacks and loggers that `fit` does not support are refused with a remedy."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.adapters.lightning import fit
from holdfast.adapters.lightning.fitting.accepted import (
    OPTIONS,
    check_built_inside,
    check_callback,
    check_hooks,
    check_logger,
    check_options,
    is_own,
)
from holdfast.elastic import ConfigError

THEIRS = "lightning.pytorch.callbacks"


def made(name: str, *bases: type, module: str = THEIRS, **members: Any) -> Any:
    return type(name, bases, {"__module__": module, **members})


CALLBACK = made("Callback")
MODEL_CHECKPOINT = made(
    "ModelCheckpoint",
    CALLBACK,
    _train_time_interval=None,
    save_last=True,
    save_on_exception=False,
    dirpath="saves",
)


def test_every_supported_option_has_its_meaning() -> None:
    check_options(dict.fromkeys(OPTIONS))
    check_options({"precision": "bf16-mixed", "val_check_interval": 0.5, "max_steps": 7})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate_grad_batches": 4}, "set Batch(microbatches=...) in holdfast.resilient"),
        ({"strategy": "fsdp"}, "fully_shard(layer, mesh=self.device_mesh)"),
        ({"ckpt_path": "last"}, "set checkpoint=Checkpoints(...)"),
        ({"limit_train_batches": 5}, "torch.utils.data.Subset"),
        ({"nonsense": 1}, "give some of max_epochs, min_epochs"),
        ({"precision": "16-mixed"}, "'bf16-mixed', which needs no GradScaler"),
        ({"val_check_interval": "00:05:00"}, "a clock differs between ranks"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"fit\({next(iter(options))}=.*{re.escape(words)}"):
        check_options(options)


def test_a_hook_that_the_loop_replaces_is_refused_where_the_script_defines_it() -> None:
    base = made("LightningModule", optimizer_step=print, configure_optimizers=print)
    own = made("Own", base, module="script", on_train_start=print)
    check_hooks(own())
    assert is_own(own(), "on_train_start")
    assert not is_own(own(), "optimizer_step")
    assert not is_own(own(), "absent")
    stepping = made("Stepping", base, module="script", optimizer_step=print)
    with pytest.raises(ConfigError, match=r"Stepping\.optimizer_step has no meaning .*run\.step"):
        check_hooks(stepping())


def test_callbacks_of_the_script_and_some_of_lightnings_are_taken() -> None:
    check_callback(made("Mine", CALLBACK, module="script")())
    check_callback(made("EarlyStopping", CALLBACK)())
    check_callback(MODEL_CHECKPOINT())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (made("Timer", CALLBACK), "give max_steps or max_epochs"),
        (made("TQDMProgressBar", made("ProgressBar", CALLBACK)), "holdfast status"),
        (made("EMAWeightAveraging", made("WeightAveraging", CALLBACK)), "AveragedModel"),
        (made("Mine", made("Timer", CALLBACK), module="script"), "the callback Timer"),
        (made("DeviceStatsMonitor", CALLBACK), "give your own Callback, or one of EarlyStopping"),
        (dict, "give your own Callback"),
        (made("Mine", CALLBACK, module="script", backward=print), "Mine.backward has no meaning"),
        (made("A", MODEL_CHECKPOINT, module="script", save_last="link"), "give save_last=True"),
        (made("A", MODEL_CHECKPOINT, module="script", _train_time_interval=3), "a clock differs"),
        (made("A", MODEL_CHECKPOINT, module="script", save_on_exception=True), "leave it out"),
        (made("A", MODEL_CHECKPOINT, module="script", dirpath="s3://a/b"), "checkpoint=Checkpoi"),
    ],
)
def test_other_callbacks_are_refused(kind: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_callback(kind())


def test_loggers_whose_files_can_be_kept_exact_are_taken() -> None:
    csv = made("CSVLogger", module="lightning.pytorch.loggers", save_dir="logs")
    assert check_logger(made("Mine", csv, module="script")()) == "CSVLogger"
    with pytest.raises(ConfigError, match="WandbLogger is not supported: give CSVLogger or Tens"):
        check_logger(made("WandbLogger", module="lightning.pytorch.loggers", save_dir="a")())
    remote = made("TensorBoardLogger", module="lightning.pytorch.loggers", save_dir="s3://a")
    with pytest.raises(ConfigError, match="give a directory that all nodes see"):
        check_logger(remote())


def test_a_global_variable_is_no_new_module() -> None:
    module = SimpleNamespace()
    check_built_inside("module", module, [{"other": 1}])
    with pytest.raises(ConfigError, match="the module SimpleNamespace is a global variable"):
        check_built_inside("module", module, [{"net": module}])


def test_callbacks_and_loggers_come_in_lists() -> None:
    run: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"fit\(callbacks=Callback\): give a list"):
        fit(run, object(), callbacks=CALLBACK())


def test_without_lightning_the_call_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "holdfast.adapters.lightning.fitting.driving", raising=False)
    run: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[lightning\]'"):
        fit(run, object())
