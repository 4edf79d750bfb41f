"""Settings of FSDP2 in training arguments: honoured, or refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.adapters.hf.sharding import check_sharding
from holdfast.elastic import ConfigError


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"version": 2, "reshard_after_forward": False},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
        {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        {"state_dict_type": "FULL_STATE_DICT", "cpu_offload": False},
        {"cpu_ram_efficient_loading": "false", "xla": False, "activation_checkpointing": "False"},
    ],
)
def test_settings_that_are_honoured_are_accepted(config: dict[str, Any]) -> None:
    check_sharding(config, "SFTTrainer")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"version": 1}, r"fsdp_config\['version'\]=1 is not supported.*set version to 2"),
        ({"cpu_offload": True}, r"fsdp_config\['cpu_offload'\]=True.*weights are on the CPU"),
        ({"activation_checkpointing": True}, r"TrainingArguments\(gradient_checkpointing=True\)"),
        ({"cpu_ram_efficient_loading": True}, "every process loads the weights"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "checkpoints hold whole tensors"),
        ({"forward_prefetch": "true"}, "FSDP2 has no such setting"),
        ({"xla": True}, "FSDP for TPUs"),
    ],
)
def test_any_other_setting_is_refused_with_a_remedy(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_sharding(config, "Trainer")


def test_fsdp_is_refused_for_grpo() -> None:
    with pytest.raises(ConfigError, match=r"GRPOTrainer.*sampling needs whole weights"):
        check_sharding({}, "GRPOTrainer")
