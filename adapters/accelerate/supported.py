"""Ways of using accelerate that these checkpoints cover; all others are refused by name."""

from __future__ import annotations

from typing import Any, Final

from holdfast.ckpt import StateError

_DEVICES: Final = ("cpu", "cuda")
_DISTRIBUTED: Final = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")

_REMEDIES: Final = {
    "DEEPSPEED": "use FSDP2 (FullyShardedDataParallelPlugin(fsdp_version=2)), or keep save_state, "
    "whose directories `holdfast convert` reads (docs/how-to/deepspeed.md)",
    "MEGATRON_LM": "use FSDP2, or keep save_state, whose directories `holdfast convert` reads "
    "(docs/how-to/patterns.md)",
}
_AXES: Final = ("tp", "cp", "sp")
_STATEFUL_HOOKS: Final = ("power_sgd", "batched_power_sgd")


def check_accelerator(accelerator: Any) -> None:
    """Raise ``StateError`` that names the first part of an Accelerator that is not supported."""
    kind = _word(accelerator.distributed_type)
    if kind not in _DISTRIBUTED:
        remedy = _REMEDIES.get(kind, "use one process, DDP or FSDP2, on CPUs or GPUs of CUDA")
        raise StateError(f"Accelerator with distributed_type {kind}: not supported; {remedy}")
    if accelerator.device.type not in _DEVICES:
        raise StateError(
            f"Accelerator on {accelerator.device.type}: not supported, the states of its random "
            f"generators are not kept; use {' or '.join(_DEVICES)}"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise StateError(
            "Accelerator with FSDP1: not supported; give "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if accelerator.mixed_precision == "fp8":
        raise StateError("Accelerator(mixed_precision='fp8'): not supported; give 'bf16'")
    axes = accelerator.parallelism_config
    for axis in _AXES if axes is not None else ():
        if getattr(axes, f"{axis}_size", 1) > 1:
            raise StateError(
                f"ParallelismConfig({axis}_size={getattr(axes, f'{axis}_size')}): not supported "
                "yet; use dp_replicate_size and dp_shard_size, or write the loop with holdfast.save"
            )
    if accelerator.project_configuration.save_on_each_node:
        raise StateError(
            "ProjectConfiguration(save_on_each_node=True): leave it out; every rank writes its own "
            "part of one checkpoint, to a directory or store that all nodes see"
        )
    _check_hooks(accelerator)


def _check_hooks(accelerator: Any) -> None:
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise StateError(
            "register_save_state_pre_hook, register_load_state_pre_hook: such hooks write and read "
            "files of save_state; give the objects to accelerator.register_for_checkpointing "
            "instead, and remove the hooks"
        )
    handler = accelerator.ddp_handler
    if handler is not None and _word(handler.comm_hook) in _STATEFUL_HOOKS:
        raise StateError(
            f"DistributedDataParallelKwargs(comm_hook={_word(handler.comm_hook)}): the state of "
            "this hook is not kept; use another hook, or none"
        )


def check_between_steps(accelerator: Any) -> None:
    """Raise ``StateError`` if gradients are accumulated that no optimizer has applied yet."""
    if not accelerator.sync_gradients:
        done = accelerator.step % accelerator.gradient_accumulation_steps
        raise StateError(
            f"save: {done} of {accelerator.gradient_accumulation_steps} microbatches are "
            "accumulated, and a checkpoint has no gradients; save after the step, under "
            "`if accelerator.sync_gradients:`"
        )


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))
