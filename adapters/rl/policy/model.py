"""A small decoder-only transformer, with one code path for training and one for decoding.

Decoding feeds exactly one token per slot per call, at one fixed shape, for prompts and answers
alike. So a token's logits depend on the tokens before it and on nothing else, bit for bit: not on
the slot, not on the neighbours, not on whether the sequence was interrupted and fed again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from holdfast.adapters.rl.policy.policy import Policy


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of the transformer; ``context`` bounds prompt plus answer, in tokens."""

    vocabulary: int = 128
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 16

    def __post_init__(self) -> None:
        if self.width % (16 * self.heads):
            raise ValueError(f"width {self.width} is no multiple of 16 x {self.heads} heads")
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}, at least one is needed")
        if self.context < 4:
            raise ValueError(f"context is {self.context}, at least 4 tokens are needed")


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm, each added to its input.

    ``mine`` selects the heads that this rank computes, where a layer is cut over several ranks.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.mine = config.heads, slice(None)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform [batch, length, width] causally."""
        query, key, value = self._project(x)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._finish(x, mixed)

    def prefill(self, x: Tensor, cache: Tensor, *, slots: Tensor) -> Tensor:
        """Transform [rows, length, width] causally; fill the first positions of their ``slots``."""
        query, key, value = self._project(x)
        cache[0][slots, :, : x.shape[1]] = key
        cache[1][slots, :, : x.shape[1]] = value
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._finish(x, mixed)

    def decode(self, x: Tensor, cache: Tensor, *, position: Tensor, mask: Tensor) -> Tensor:
        """Transform one token per slot [slots, 1, width], extending ``cache`` in place.

        ``cache`` is [2, slots, heads, context, head width]; ``mask`` [slots, 1, 1, context] is
        added to the scores.
        """
        query, key, value = self._project(x)
        slots = torch.arange(x.shape[0])
        cache[0][slots, :, position] = key[:, :, 0]
        cache[1][slots, :, position] = value[:, :, 0]
        scores = query @ cache[0].transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask
        return self._finish(x, torch.softmax(scores, -1) @ cache[1])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, width = x.shape
        joined = self.qkv(self.attention_norm(x))
        if isinstance(joined, DTensor):  # whole here, but each rank uses its own heads only
            joined = joined.to_local(grad_placements=[Partial()])
        split = joined.view(batch, length, 3, self.heads, width // self.heads)[..., self.mine, :]
        query, key, value = split.permute(2, 0, 3, 1, 4)
        return query, key, value

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        out: Tensor = x + self.mlp_out(hidden)
        return out


class LanguageModel(Policy):
    """A transformer that maps tokens to logits of the next token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, length, vocabulary] of ``tokens`` [batch, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def layers(self) -> list[Block]:
        """Return the blocks."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def cut(self, mesh: DeviceMesh) -> None:
        """Give each rank its heads and its hidden units (Shoeybi et al., "Megatron-LM").

        ``qkv`` is cut by rows in their stored order, so that its shards are those of one whole
        tensor under its own name; its output is gathered before the heads are divided among the
        ranks.
        """
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        gathered = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        for block in self.layers():
            plan = {
                "qkv": gathered,
                "attention_out": RowwiseParallel(),
                "mlp_in": ColwiseParallel(),
                "mlp_out": RowwiseParallel(),
            }
            parallelize_module(block, mesh, plan)
            heads = block.heads // mesh.size()
            first = mesh.get_local_rank() * heads
            block.mine = slice(first, first + heads)

    def new_cache(self, slots: int) -> Tensor:
        """Return an empty key-value cache for ``slots`` sequences."""
        config = self.config
        head_width = config.width // config.heads
        return torch.zeros(config.layers, 2, slots, config.heads, config.context, head_width)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Feed ``tokens`` [rows, length] at once to ``slots`` [rows], each from its beginning."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for index, block in enumerate(self.layers()):
            x = block.prefill(x, cache[index], slots=slots)

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """Feed one token per slot (``tokens``, ``positions``: [slots]); return logits per slot."""
        x = (self.tokens(tokens) + self.positions(positions)).unsqueeze(1)
        seen = torch.arange(self.config.context)[None, :] <= positions[:, None]
        mask = torch.where(seen, 0.0, float("-inf"))[:, None, None, :]
        for index, block in enumerate(self.layers()):
            x = block.decode(x, cache[index], position=positions, mask=mask)
        logits: Tensor = self.head(self.final_norm(x))[:, 0]
        return logits


def build_model(config: ModelConfig, *, seed: int) -> LanguageModel:
    """Return a freshly initialised model that is a pure function of ``config`` and ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LanguageModel(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        for block in model.layers():
            for linear in (block.attention_out, block.mlp_out):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))
    return model


def weights_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of full tensors: names, shapes and every bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(
            tensor.view(torch.uint8).numpy().data if tensor.dim() else tensor.numpy().tobytes()
        )
    return digest.hexdigest()
