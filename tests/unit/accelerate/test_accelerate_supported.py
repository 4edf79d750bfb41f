"""An Accelerator that cannot be saved whole is refused by name, with a remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.adapters.accelerate.supported import check_accelerator, check_between_steps
from holdfast.ckpt import StateError


def accelerator(**how: Any) -> Any:
    project = SimpleNamespace(save_on_each_node=how.pop("save_on_each_node", False))
    given = {
        "distributed_type": "MULTI_CPU",
        "device": SimpleNamespace(type="cpu"),
        "is_fsdp2": False,
        "mixed_precision": "no",
        "parallelism_config": None,
        "project_configuration": project,
        "ddp_handler": None,
        "_save_model_state_pre_hook": {},
        "_load_model_state_pre_hook": {},
    }
    return SimpleNamespace(**{**given, **how})


def test_one_process_ddp_and_fsdp2_are_supported() -> None:
    for kind, sharded in (("NO", False), ("MULTI_CPU", False), ("MULTI_GPU", False)):
        check_accelerator(accelerator(distributed_type=kind, is_fsdp2=sharded))
    check_accelerator(accelerator(distributed_type="FSDP", is_fsdp2=True, mixed_precision="bf16"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"distributed_type": "DEEPSPEED"}, "DEEPSPEED: not supported; use FSDP2"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM: not supported; use FSDP2"),
        ({"distributed_type": "XLA"}, "XLA: not supported; use one process, DDP or FSDP2"),
        ({"distributed_type": "FSDP"}, "FSDP1: not supported; give .*fsdp_version=2"),
        ({"device": SimpleNamespace(type="mps")}, "on mps: not supported"),
        ({"mixed_precision": "fp8"}, "give 'bf16'"),
        ({"parallelism_config": SimpleNamespace(tp_size=2)}, "tp_size=2"),
        ({"parallelism_config": SimpleNamespace(cp_size=4)}, "cp_size=4"),
        ({"save_on_each_node": True}, "save_on_each_node=True"),
        ({"_save_model_state_pre_hook": {1: print}}, "register_for_checkpointing"),
        ({"_load_model_state_pre_hook": {1: print}}, "register_for_checkpointing"),
        ({"ddp_handler": SimpleNamespace(comm_hook="power_sgd")}, "comm_hook=power_sgd"),
    ],
)
def test_others_are_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        check_accelerator(accelerator(**how))


def test_a_save_between_two_microbatches_of_a_step_is_refused() -> None:
    found = SimpleNamespace(sync_gradients=False, step=6, gradient_accumulation_steps=4)
    with pytest.raises(StateError, match=r"2 of 4 microbatches .*accelerator.sync_gradients"):
        check_between_steps(found)
    check_between_steps(SimpleNamespace(sync_gradients=True))
