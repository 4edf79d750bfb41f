"""The settings of FSDP2 in the training arguments: those that are honoured; the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.elastic import ConfigError

_HONOURED: Final = frozenset(
    {
        *("version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params"),
        "reshard_after_forward",
    }
)
"""Fields of ``fsdp_config`` with any value; of ``version``, that is 2."""

_ONLY: Final[Mapping[str, str]] = {"state_dict_type": "full_state_dict"}
"""Fields that must have this value, or none."""

_REMEDIES: Final[Mapping[str, str]] = {
    "version": "FSDP2 alone can be cut anew after a change of the ranks: set version to 2",
    "cpu_offload": "leave it out: the weights are on the CPU",
    "offload_params": "leave it out: the weights are on the CPU",
    "activation_checkpointing": "set TrainingArguments(gradient_checkpointing=True)",
    "cpu_ram_efficient_loading": "leave it out: every process loads the weights before it cuts "
    "them",
    "state_dict_type": "leave it out: checkpoints hold whole tensors, which any number of ranks "
    "loads",
    "xla": "leave it out: this is FSDP for TPUs",
}
_LEAVE_OUT: Final = "leave it out: FSDP2 has no such setting"
_NO: Final = frozenset({"", "0", "false", "none"})


def check_sharding(config: Mapping[str, Any], kind: str) -> None:
    """Raise ``ConfigError`` that names the first setting of FSDP2 that is not honoured.

    ``config`` is the ``fsdp_config`` of training arguments, ``kind`` the library's Trainer.
    """
    if kind == "GRPOTrainer":
        raise ConfigError(
            "fsdp is not supported with resilient_trainer(GRPOTrainer): sampling needs whole "
            "weights; leave it out, and train LoRA with HoldfastArguments(rebuild_frozen=True), or "
            "use the RL library (docs/how-to/reinforcement-learning.md)"
        )
    for name, value in config.items():
        if not _is_honoured(name, value):
            raise ConfigError(
                f"fsdp_config[{name!r}]={value!r} is not supported with resilient_trainer yet: "
                f"{_REMEDIES.get(name, _LEAVE_OUT)}"
            )


def _is_honoured(name: str, value: Any) -> bool:
    text = str(value).lower()
    if name == "version":
        return text == "2"
    return name in _HONOURED or text in _NO or _ONLY.get(name) == text
