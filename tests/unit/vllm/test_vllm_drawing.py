"""The tokens that a vLLM server draws are those of every other engine."""

from __future__ import annotations

import math

import numpy as np
import torch

from holdfast.adapters.rl.samples.noise import choose
from holdfast.adapters.vllm.drawing import drawn


def test_tokens_are_those_that_the_included_engine_draws() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 50, generator=generator) * 4
    noise = torch.rand(300, generator=generator, dtype=torch.float64)
    expected = choose(logits.numpy(), noise.numpy())
    assert drawn(logits, noise).tolist() == expected.tolist()


def test_a_token_without_probability_is_never_drawn_whatever_the_noise() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0]]).expand(3, -1)
    noise = torch.from_numpy(np.array([0.0, 0.4999, 1 - 2**-53]))
    assert drawn(logits, noise).tolist() == [1, 1, 3]
