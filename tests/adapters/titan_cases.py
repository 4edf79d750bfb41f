"""Cases of one rank: Holdfast's checkpoint manager with the parts of torchtitan's trainer.

Prints ``CASES`` and a JSON object with the traceback of every case, empty where it passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from titan_job import trainer_of  # before anything else of torchtitan
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

from holdfast import ckpt
from holdfast.adapters.dcp import HoldfastWriter
from holdfast.adapters.torchtitan import holdfast_checkpoints
from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic import ConfigError

ARGUMENTS = (
    *("--module", "my_run", "--config", "my_run", "--dump_folder", "cases"),
    *("--training.local_batch_size", "1", "--training.seq_len", "32", "--training.steps", "2"),
)
WEIGHT = "layers.1.feed_forward.w2.weight"


class Parts:
    """A trainer that took two steps, and managers of its state in folders by name."""

    def __init__(self) -> None:
        self.trainer = trainer_of(list(ARGUMENTS))
        self.trainer.train()
        self.made: list[Any] = []

    def folder(self, name: str) -> Path:
        return (Path("cases") / name).absolute()

    def manager(self, name: str, *, theirs: bool = False, **settings: Any) -> Any:
        chosen = {"enable": True, "folder": str(self.folder(name)), "keep_latest_k": 0, **settings}
        config: Any = CheckpointManager.Config(**chosen)
        if not theirs:
            config = holdfast_checkpoints(config)
        trainer, spec = self.trainer, self.trainer.config.model_spec
        made = config.build(
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer},
            sd_adapter=spec.state_dict_adapter(trainer.model_config, trainer.config.hf_assets_path),
        )
        self.made.append(made)
        return made

    def weight(self) -> torch.Tensor:
        found = self.trainer.model_parts[0].state_dict()[WEIGHT]
        return found.full_tensor() if hasattr(found, "full_tensor") else found

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for part in self.trainer.model_parts:
                for parameter in part.parameters():
                    parameter.fill_(value)

    def end(self) -> None:
        for manager in self.made:
            manager.close()
        self.made.clear()


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Want an error of a kind whose message has the words."""
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def case_the_newest_k_stay_with_pinned_ones_and_foreign_folders(parts: Parts) -> None:
    foreign = parts.folder("kept") / "step-3"
    foreign.mkdir(parents=True)
    manager = parts.manager("kept", keep_latest_k=2, interval=1)
    manager.save(1)
    pins.update(LocalStore(parts.folder("kept")), there=[1], pin=[1], host="here", now_s=0)
    for step in (2, 3, 4, 5):
        manager.save(step)
    manager.close()
    assert committed_steps(parts.folder("kept")) == [1, 4, 5]
    assert foreign.is_dir()


def case_the_newest_k_stay_after_saves_in_the_background_and_the_last(parts: Parts) -> None:
    manager = parts.manager("kept_async", keep_latest_k=2, interval=1, async_mode="async")
    for step in (1, 2, 3):
        manager.save(step)
    manager.save(4, last_step=True)
    manager.close()
    assert committed_steps(parts.folder("kept_async")) == [3, 4]


def case_a_run_that_goes_back_keeps_its_own_newest_steps(parts: Parts) -> None:
    first = parts.manager("back", interval=1)
    for step in (10, 20, 30, 40):
        first.save(step)
    back = parts.manager("back", interval=1, keep_latest_k=2, async_mode="async")
    assert back.load(20)
    for step in (21, 22, 23):
        back.save(step)
    back.close()
    assert committed_steps(parts.folder("back")) == [22, 23, 30, 40]


def case_a_url_is_a_folder(parts: Parts) -> None:
    parts.fill(16.0)
    url = f"file://{parts.folder('url')}"
    manager = parts.manager("", folder=url, interval=1, keep_latest_k=2)
    for step in (1, 2, 3):
        manager.save(step)
    parts.fill(0.5)
    assert manager.load()
    assert parts.weight().unique().tolist() == [16.0]
    manager.close()
    assert committed_steps(url) == [2, 3]
    parts.fill(0.5)
    assert parts.manager("from_url", initial_load_path=url).load()
    assert parts.weight().unique().tolist() == [16.0]


def case_a_background_save_has_the_values_of_its_step(parts: Parts) -> None:
    manager = parts.manager("staged", async_mode="async", interval=1)
    parts.fill(1.0)
    manager.save(1)
    parts.fill(2.0)  # while it is written, or after
    manager.close()
    assert parts.manager("staged").load()
    assert parts.weight().unique().tolist() == [1.0]


def case_close_waits_for_the_save_in_the_background(parts: Parts) -> None:
    """pytorch/torchtitan#4270: torchtitan 0.3 does not wait."""
    waited, finish = threading.Event(), HoldfastWriter.finish
    manager = parts.manager("closed", async_mode="async", interval=1)
    inner = manager._wait_for_saving

    def waiting() -> None:
        waited.set()
        inner()

    def after_waiting(self: HoldfastWriter, **arguments: Any) -> None:
        waited.wait()
        finish(self, **arguments)

    manager._wait_for_saving = waiting
    HoldfastWriter.finish = after_waiting  # type: ignore[method-assign]
    try:
        manager.save(1)
        assert committed_steps(parts.folder("closed")) == []
        manager.close()
        assert committed_steps(parts.folder("closed")) == [1]
    finally:
        HoldfastWriter.finish = finish  # type: ignore[method-assign]
        waited.set()


def case_the_error_of_a_background_save_is_told_once(parts: Parts) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    manager = parts.manager("odd", async_mode="async", interval=1)
    manager.states["odd"] = Odd()
    manager.save(1)
    with refused(ckpt.StateError, "odd.lock"):
        manager.save(2)
    del manager.states["odd"]
    manager.save(3)
    manager.close()
    assert committed_steps(parts.folder("odd")) == [3]


def case_a_model_only_step_does_not_continue_a_run_but_begins_one(parts: Parts) -> None:
    parts.fill(3.0)
    manager = parts.manager("last", last_save_model_only=True, export_dtype="bfloat16")
    manager.save(500)
    manager.save(501, last_step=True)
    with ckpt.open(parts.folder("last")) as opened:
        assert opened[WEIGHT].dtype == torch.bfloat16
        assert not [name for name in opened if name.startswith("optimizer.")]
    with refused(ckpt.MismatchError, "step 501 has the model only", "with one of 500"):
        manager.load()
    assert manager.load(500)
    parts.fill(4.0)
    for path in (parts.folder("last"), parts.folder("last") / "step-000000000501"):
        begun = parts.manager("begun", initial_load_path=str(path))
        assert begun.load()
        assert parts.weight().unique().tolist() == [3.0]
        assert parts.weight().dtype == torch.float32


def case_excluded_state_is_left_alone(parts: Parts) -> None:
    manager = parts.manager("excluded", interval=1)
    parts.trainer.step = 7
    manager.save(7)
    parts.trainer.step = 1
    chosen = parts.manager("excluded", exclude_from_loading=["train_state", "dataloader"])
    assert chosen.load()
    assert parts.trainer.step == 1
    assert manager.load()
    assert parts.trainer.step == 7


def case_state_that_a_checkpoint_lacks_is_named_with_the_remedy(parts: Parts) -> None:
    manager = parts.manager("lacking", interval=1)
    del manager.states["lr_scheduler"]
    manager.save(1)
    with refused(ckpt.MismatchError, "no lr_scheduler", "exclude_from_loading lr_scheduler"):
        parts.manager("lacking").load()
    assert parts.manager("lacking", exclude_from_loading=["lr_scheduler"]).load()


def case_load_only_loads_and_saves_nothing(parts: Parts) -> None:
    parts.fill(5.0)
    parts.manager("read", interval=1).save(1)
    parts.fill(6.0)
    reading = parts.manager("read", interval=1, load_only=True, keep_latest_k=2)
    assert reading.load()
    assert parts.weight().unique().tolist() == [5.0]
    assert not reading.save(2) and not reading.save(3, last_step=True)
    assert committed_steps(parts.folder("read")) == [1]


def case_safetensors_are_torchtitan_s_own_in_both_directions(parts: Parts) -> None:
    parts.fill(7.0)
    manager = parts.manager("hf", interval=1, last_save_in_hf=True, keep_latest_k=2)
    manager.save(1)
    manager.save(2, last_step=True)
    written = parts.folder("hf") / "step-2"
    assert list(written.glob("*.safetensors"))
    assert committed_steps(parts.folder("hf")) == [1]
    parts.fill(8.0)
    begun = parts.manager("hf_begun", initial_load_in_hf=True, initial_load_path=str(written))
    assert begun.load()
    assert parts.weight().unique().tolist() == [7.0]
    nowhere = str(parts.folder("hf") / "nowhere")
    with refused(ckpt.NotFoundError, "no directory of safetensors"):
        parts.manager("hf_lost", initial_load_in_hf=True, initial_load_path=nowhere).load()


def case_a_run_goes_over_from_torchtitan_s_own_files(parts: Parts) -> None:
    parts.fill(9.0)
    parts.trainer.step = 30
    parts.manager("over", theirs=True, interval=1).save(30)
    (parts.folder("over") / "step-40").mkdir()  # a save of theirs that did not finish
    parts.fill(0.5)
    parts.trainer.step = 0
    manager = parts.manager("over", interval=1, keep_latest_k=2)
    assert manager.load()
    assert (parts.trainer.step, parts.weight().unique().tolist()) == (30, [9.0])
    parts.fill(0.25)
    for step in (31, 32, 33):
        manager.save(step)
    parts.fill(0.5)
    assert manager.load()
    assert parts.weight().unique().tolist() == [0.25]
    assert manager.load(30)
    assert parts.weight().unique().tolist() == [9.0]
    manager.close()
    assert committed_steps(parts.folder("over")) == [32, 33]
    assert (parts.folder("over") / "step-30" / ".metadata").is_file()


def case_a_run_begins_from_torchtitan_s_own_files(parts: Parts) -> None:
    parts.fill(11.0)
    parts.manager("theirs", theirs=True, interval=1).save(3)
    parts.fill(0.5)
    parts.trainer.step = 9
    step = parts.folder("theirs") / "step-3"
    assert parts.manager("from_theirs", initial_load_path=str(step)).load()
    assert (parts.trainer.step, parts.weight().unique().tolist()) == (9, [11.0])
    with refused(ckpt.NotFoundError, "there is no checkpoint", "such as"):
        parts.manager("from_theirs", initial_load_path=str(step.parent)).load()


def case_a_whole_checkpoint_begins_a_run(parts: Parts) -> None:
    parts.fill(12.0)
    parts.trainer.step = 20
    parts.manager("source", interval=1).save(20)
    parts.trainer.step = 0
    settings = {"initial_load_path": str(parts.folder("source")), "initial_load_model_only": False}
    assert parts.manager("whole", **settings).load()
    assert parts.trainer.step == 20


def case_a_seed_checkpoint_gives_the_model_only(parts: Parts) -> None:
    parts.fill(13.0)
    manager = parts.manager("seed")
    manager.save(0, last_step=True)
    parts.fill(0.5)
    parts.trainer.step = 4
    assert manager.load()
    assert (parts.trainer.step, parts.weight().unique().tolist()) == (4, [13.0])


def case_a_step_that_is_not_there_is_refused_with_those_that_are(parts: Parts) -> None:
    manager = parts.manager("steps", interval=1)
    assert not manager.load()
    with refused(ckpt.NotFoundError, "load_step=5", "steps there: none"):
        manager.load(5)
    manager.save(1)
    manager.save(2)
    with refused(ckpt.NotFoundError, "load_step=5", "steps there: 1, 2"):
        manager.load(5)


def case_a_flipped_bit_is_found_and_a_cut_file_passed_over(parts: Parts) -> None:
    manager = parts.manager("damaged", interval=1)
    parts.fill(14.0)
    manager.save(1)
    parts.fill(15.0)
    manager.save(2)
    (pack,) = (parts.folder("damaged") / "step-000000000002" / "data").iterdir()
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.write_bytes(data)
    with refused(ckpt.CorruptError, str(pack)):
        manager.load()
    os.truncate(pack, 100)
    assert manager.load()
    assert parts.weight().unique().tolist() == [14.0]


def case_weights_of_another_dtype_are_refused_with_the_remedy(parts: Parts) -> None:
    manager = parts.manager("dtype", interval=1)
    weights = manager.states["model"]
    whole = weights.state_dict
    weights.state_dict = lambda: {k: v.to(torch.bfloat16) for k, v in whole().items()}
    manager.save(1)
    with refused(ckpt.MismatchError, "is bfloat16", "--training.dtype bfloat16"):
        parts.manager("dtype").load()


def case_folders_and_managers_without_a_place_here_are_refused(parts: Parts) -> None:
    with refused(ckpt.StoreError, "ftp:// are not supported"):
        parts.manager("none", folder="ftp://host/x")
    with refused(ConfigError, "BaseCheckpointManager", "give a CheckpointManager.Config"):
        holdfast_checkpoints(BaseCheckpointManager.Config())
    config = holdfast_checkpoints(CheckpointManager.Config(keep_latest_k=7, interval=3))
    assert (config.keep_latest_k, config.interval) == (7, 3)
    assert holdfast_checkpoints(config) is config
    disabled = parts.manager("off", enable=False)
    assert not disabled.load() and not disabled.save(1)
    disabled.close()


def main() -> None:
    """Run every case; each has folders of its own."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(names, MASTER_PORT="0")
    shutil.rmtree("cases", ignore_errors=True)
    parts, found = Parts(), {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            found[name.removeprefix("case_")] = _outcome(case, parts)
    print("CASES", json.dumps(found))


def _outcome(case: Callable[[Parts], None], parts: Parts) -> str:
    try:
        case(parts)
    except Exception:  # noqa: BLE001  it is printed, and the next case runs
        return traceback.format_exc()
    finally:
        parts.end()
    return ""


if __name__ == "__main__":
    main()
