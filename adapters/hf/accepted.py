"""The Trainers and the training arguments that work with Holdfast's loop; the rest is refused.

A field that is listed nowhere must have its default: a new version of transformers may add one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from holdfast.adapters.hf.sharding import check_sharding
from holdfast.elastic import ConfigError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON: Final = _names(
    """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim weight_decay adam_beta1 adam_beta2
    adam_epsilon gradient_accumulation_steps average_tokens_across_devices max_grad_norm
    label_smoothing_factor bf16 tf32 activation_checkpointing activation_checkpointing_kwargs
    gradient_checkpointing gradient_checkpointing_kwargs use_cache logging_strategy
    logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica log_on_each_node disable_tqdm report_to run_name project eval_strategy
    eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_do_concat_batches
    eval_accumulation_steps include_for_metrics batch_eval_metrics eval_use_gather_object
    save_only_model save_strategy save_steps save_total_limit load_best_model_at_end
    metric_for_best_model greater_is_better seed use_cpu dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names fsdp
    train_sampling_strategy length_column_name skip_memory_metrics do_train do_eval do_predict
    resume_from_checkpoint local_rank ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    """
)
"""Fields of TrainingArguments that have their meaning, or (``ddp_…``) no effect and do no harm."""

_OF_SFT: Final = _names(
    """
    model_init_kwargs trust_remote_code chat_template_path dataset_text_field dataset_kwargs
    dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy
    padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type
    pad_token
    """
)

_OF_DPO: Final = _names(
    """
    model_init_kwargs trust_remote_code disable_dropout dataset_num_proc max_length truncation_mode
    padding_free pad_to_multiple_of loss_type loss_weights ld_alpha f_divergence_type
    f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau pad_token
    """
)

_OF_GRPO: Final = _names(
    """
    model_init_kwargs trust_remote_code disable_dropout num_generations num_generations_eval
    max_completion_length shuffle_dataset pad_to_multiple_of generation_batch_size
    steps_per_generation num_iterations temperature top_p top_k min_p generation_kwargs
    chat_template_kwargs repetition_penalty cache_implementation beta epsilon delta epsilon_high
    sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
    vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
    scale_rewards mask_truncated_completions top_entropy_quantile use_bias_correction_kl
    log_multimodal loss_type
    """
)

TRAINERS: Final[Mapping[str, frozenset[str]]] = {
    "transformers.trainer.Trainer": frozenset(),
    "trl.trainer.sft_trainer.SFTTrainer": _OF_SFT,
    "trl.trainer.dpo_trainer.DPOTrainer": _OF_DPO,
    "trl.trainer.grpo_trainer.GRPOTrainer": _OF_GRPO,
}
"""Supported classes of libraries, with the fields of their own arguments that are supported."""

_INNER: Final = ("trl.trainer.base_trainer._BaseTrainer",)
_LIBRARIES: Final = ("transformers.", "trl.")

_REPLACED: Final = (
    "_clip_grad_norm",
    "_finalize_training",
    "_get_grad_norm",
    "_init_training_state",
    "_inner_training_loop",
    "_maybe_log_save_evaluate",
    "_prepare_for_training",
    "_run_epoch",
    "create_accelerator_and_postprocess",
    "get_batch_samples",
    "set_initial_training_values",
    "train",
)
"""Methods of the Trainer's own loop: a subclass that changes one counts on that loop."""

_VALUES: Final[Mapping[str, frozenset[str]]] = {
    "optim": frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"}),
    "train_sampling_strategy": frozenset({"random", "sequential", "group_by_length"}),
    "lr_scheduler_type": _names(
        """
        linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt
        cosine_with_min_lr cosine_warmup_with_min_lr warmup_stable_decay
        """
    ),
}
"""Fields of which only these values are supported."""

_REMEDIES: Final[Mapping[str, str]] = {
    "deepspeed": "leave it out: Holdfast sums gradients itself",
    "parallelism_config": "leave it out: the ranks are data-parallel",
    "fp16": "set bf16=True, which needs no GradScaler",
    "torch_compile": "leave it out",
    "auto_find_batch_size": "set per_device_train_batch_size, which decides the samples of a step",
    "dataloader_drop_last": "leave it out: the last step of an epoch has the rest of the samples",
    "data_seed": "set seed, from which the order of samples follows too",
    "eval_on_start": "call trainer.evaluate() before trainer.train()",
    "push_to_hub": "call trainer.push_to_hub() on the leader after trainer.train()",
    "ignore_data_skip": "leave it out: a resumed run goes on with the next samples",
    "activation_offloading": "set activation_checkpointing=True",
}


def check_class(kind: type) -> None:
    """Raise ``ConfigError`` unless ``kind`` is a supported Trainer, or a subclass that fits."""
    names = [_full(each) for each in kind.__mro__]
    if "transformers.trainer.Trainer" not in names:
        raise ConfigError(
            f"resilient_trainer({kind.__name__}): give transformers.Trainer or a subclass of it"
        )
    for each, name in zip(kind.__mro__, names, strict=True):
        if name in TRAINERS:
            return
        if name.startswith(_LIBRARIES) and name not in _INNER:
            raise ConfigError(
                f"resilient_trainer({kind.__name__}): {each.__name__} is not supported yet; "
                f"supported are {', '.join(map(_short, TRAINERS))} and your subclasses of them: "
                "take one of these, or write the loop with run.steps (docs/how-to/hf.md)"
            )
        if changed := sorted(set(_REPLACED) & set(vars(each))):
            raise ConfigError(
                f"resilient_trainer({kind.__name__}): {each.__name__} has a {changed[0]} of its "
                "own, which Holdfast's loop replaces: move the change to training_step, "
                "compute_loss, evaluate or a TrainerCallback"
            )


def check_arguments(args: Any, kind: type) -> None:
    """Raise ``ConfigError`` that names the first training argument that is not supported."""
    supported = _COMMON | supported_of(kind)
    theirs = _of_libraries(type(args))
    for field in dataclasses.fields(args):
        if field.name not in theirs:
            continue  # of the script's own class, for its own methods
        value = getattr(args, field.name, None)
        if field.name in _VALUES:
            _check_value(field.name, value)
        elif field.name == "fsdp_config" and args.fsdp:
            check_sharding(value or {}, _short(_library(kind)))
        elif field.name not in supported and not _is_default(field, value):
            remedy = _REMEDIES.get(field.name, "leave it out")
            raise ConfigError(
                f"{type(args).__name__}({field.name}={value!r}) is not supported with "
                f"resilient_trainer yet: {remedy}"
            )


def own_classes(kind: type) -> list[type]:
    """Return the classes above a library's Trainer that are the script's own."""
    found: list[type] = []
    for each in kind.__mro__:
        name = _full(each)
        if name in TRAINERS:
            break
        if not name.startswith(("holdfast.", *_LIBRARIES)):
            found.append(each)
    return found


def supported_of(kind: type) -> frozenset[str]:
    """Return the fields that the arguments of this Trainer have beside the common ones."""
    return TRAINERS[_library(kind)]


def _library(kind: type) -> str:
    return next(_full(each) for each in kind.__mro__ if _full(each) in TRAINERS)


def _check_value(name: str, value: Any) -> None:
    found = str(getattr(value, "value", value))
    if found not in _VALUES[name]:
        raise ConfigError(
            f"{name}={found!r} is not supported with resilient_trainer yet: give one of "
            f"{', '.join(sorted(_VALUES[name]))}"
        )


def _of_libraries(kind: type) -> set[str]:
    """Return the names of fields that transformers and TRL declare."""
    classes = [each for each in kind.__mro__ if each.__module__.startswith(_LIBRARIES)]
    return {name for each in classes for name in vars(each).get("__annotations__", {})}


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether a field has its default; nothing and an empty value are alike."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return bool(value == type(value)())  # of its own fields, as accelerator_config
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    return bool(value == default) or (not value and not default)


def _full(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(name: str) -> str:
    return name.rpartition(".")[2]
