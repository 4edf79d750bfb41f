"""Makes the stored samples: small ``torch_dist`` checkpoints of megatron-core 0.16.1, on CPUs.

In an environment with torch 2.13.0, megatron-core 0.16.1, numpy, packaging and psutil::

    for s in "dense 4 --tp 2 --pp 2" "experts 4 --tp 2 --ep 2 --experts 4" \
             "buckets 2 --layers 1 --kind dp_reshardable"; do
      set -- $s; name=$1 ranks=$2; shift 2
      torchrun --standalone --nproc-per-node $ranks make_megatron.py $name "$@"
    done

Each run makes ``NAME.tar.xz`` with the directory, and ``NAME.json`` with a digest of every tensor
that a rank held, taken from the ranks' own memory and not through Megatron's checkpointing.
megatron-core wants CUDA: a few functions of torch are replaced, none that computes or stores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import random
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


_plain_type = torch.Tensor.type


def _cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _plain_type(self, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


torch.set_num_threads(1)
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")
for _name in ("tensor", "zeros", "ones", "empty", "full"):
    setattr(torch, _name, _on_cpu(getattr(torch, _name)))
torch.Tensor.type = _cuda_type
torch.Tensor.cuda = lambda self, *_, **__: self

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

filesystem_async._results_queue = queue.Queue()  # instead of one more process per rank


def make_model(args: argparse.Namespace) -> GPTModel:
    """Return this rank's part of a model like Llama or, with experts, like Mixtral."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=2,
        ffn_hidden_size=12,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=not args.experts,
        qk_layernorm=bool(args.experts),
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        expert_model_parallel_size=args.ep,
        num_moe_experts=args.experts,
        moe_ffn_hidden_size=4 if args.experts else None,
        pipeline_dtype=torch.float32,
        persist_layer_norm=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=args.experts,
            moe_grouped_gemm=False,
            qk_layernorm=bool(args.experts),
            normalization="RMSNorm",
        ),
        vocab_size=12,  # of which 10 are words
        max_sequence_length=8,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def without_padding(model: GPTModel) -> None:
    """Set the words of the vocabulary that do not exist to zero."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            parameter.data[max(10 - rank * parameter.shape[0], 0) :] = 0


def numbered(model: GPTModel, name: str) -> str:
    """Return the name of a parameter with the numbers of its layer and expert in the whole."""

    def layer(found: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(found[1])].layer_number - 1}."

    def expert(found: re.Match[str]) -> str:
        here = len(model.decoder.layers[0].mlp.experts.local_experts)
        return f"experts.{here * parallel_state.get_expert_model_parallel_rank() + int(found[1])}."

    name = re.sub(r"decoder\.layers\.(\d+)\.", layer, name)
    return re.sub(r"experts\.local_experts\.(\d+)\.", expert, name)


Part: TypeAlias = tuple[str, int, int, bytes]
"""A part of a tensor: its place, the number of all elements, the first element, the bytes."""


def parts(model: GPTModel, optimizer: Any) -> Iterator[Part]:
    """Yield this rank's parameters, and its shards of the moments."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        place = f"{rank}/{numbered(model, name)}"
        size = parameter.numel()
        yield f"model/{place}", size, 0, parameter.data.contiguous().numpy().tobytes()
        for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
            if parameter in inner.model_param_group_index_map:
                state = inner._get_main_param_and_optimizer_states(parameter)
                start = inner._get_model_param_range_map(parameter)["param"].start
                for key in ("exp_avg", "exp_avg_sq"):
                    yield f"{key}/{place}", size, start, state[key].numpy().tobytes()


def digests(gathered: Iterable[Part]) -> dict[str, str]:
    """Return a digest of every place; parts that are there twice must agree."""
    found: dict[str, dict[int, bytes]] = {}
    sizes: dict[str, int] = {}
    for place, size, start, data in gathered:
        sizes[place] = size
        assert found.setdefault(place, {}).setdefault(start, data) == data, place
    whole = {
        place: b"".join(found[place][start] for start in sorted(found[place])) for place in found
    }
    assert all(len(data) == 4 * sizes[place] for place, data in whole.items())
    return {place: hashlib.sha256(data).hexdigest()[:16] for place, data in whole.items()}


def share_parameters(wrapped: DistributedDataParallel) -> None:
    """Give every rank the shards of the parameters that the others have updated."""
    for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            ranks = dist.get_world_size(buffer.data_parallel_group)
            shards = list(bucket.param_data.chunk(ranks))
            own = shards[dist.get_rank(buffer.data_parallel_group)].clone()
            received = [torch.empty_like(own) for _ in shards]
            dist.all_gather(received, own, group=buffer.data_parallel_group)
            for shard, data in zip(shards, received, strict=True):
                shard.copy_(data)


def make(args: argparse.Namespace) -> None:
    """Train one step with random gradients, and save."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tp, args.pp, expert_model_parallel_size=args.ep)
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    model = make_model(args)
    without_padding(model)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [wrapped])
    give_gradients(model)
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner._copy_model_grads_to_main_grads()
        inner.optimizer.step()
        inner._copy_main_params_to_model_params()
    share_parameters(wrapped)
    metadata = {"distrib_optim_sharding_type": args.kind, "chained_optim_avoid_prefix": True}
    state = wrapped.module.sharded_state_dict(metadata=metadata)
    generators = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state()[:64],
        "rng_tracker_states": {},
    }
    ranks, rank = (dist.get_world_size(),), (dist.get_rank(),)
    saved = {
        "model": state,
        "iteration": 7,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(
            num_layers=args.layers,
            params_dtype=torch.float32,
            attention_backend=model.config.attention_backend,
        ),
        "rng_state": ShardedObject("rng_state", [generators], ranks, rank),
        "optimizer": optimizer.sharded_state_dict(state, metadata=metadata),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(parts(model, optimizer)))
    directory = Path(args.name)
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    dist.barrier()
    dist_checkpointing.save(saved, str(directory))
    dist.barrier()
    if dist.get_rank() == 0:
        store(directory, gathered)
    dist.destroy_process_group()


def give_gradients(model: GPTModel) -> None:
    """Give every shard its own gradient, replicas the same, and words that do not exist none."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        own = rank if getattr(parameter, "tensor_model_parallel", False) else 0
        seed = zlib.crc32(f"{own} {numbered(model, name)}".encode())
        generator = torch.Generator().manual_seed(seed)
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        if "word_embeddings" in name or "output_layer" in name:
            parameter.main_grad[max(10 - rank * parameter.shape[0], 0) :] = 0


def store(directory: Path, gathered: list[list[Part]]) -> None:
    """Write the archive, and the digests of all ranks."""
    found = digests(chain.from_iterable(gathered))
    with tarfile.open(f"{directory}.tar.xz", "w:xz") as archive:
        archive.add(directory, arcname=".")
    Path(f"{directory}.json").write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    for axis in ("tp", "pp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--kind", default="fully_reshardable")
    make(parser.parse_args())
