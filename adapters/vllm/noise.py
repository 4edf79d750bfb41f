"""Tokens drawn by their place: a logits processor of vLLM, and its rule.

A request with ``holdfast_place`` = [seed, ordinal, sample, position] gets, for the token at each
position, the number that every other engine draws for it. The token that the number picks gets the
largest logit, beside which no other counts. The log-probabilities that vLLM tells are taken before.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from holdfast.adapters.rl.samples.noise import uniform
from holdfast.adapters.vllm.drawing import drawn

PLACE: Final = "holdfast_place"
DRAWN: Final = "holdfast_drawn"
"""A request with a place that leaves all drawing to it: its temperature, 0, asks for no noise."""

_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "n": (1,),
}
"""The values with which the log-probabilities are those of the policy."""


@dataclass(frozen=True, slots=True)
class _PlacedRequest:
    """The place of a request's first token, and its output tokens, to which vLLM appends."""

    seed: int
    ordinal: int
    sample: int
    position: int
    output: list[int]


class PlacedNoise(LogitsProcessor):  # type: ignore[misc]
    """Leaves, for every request with a place, the one token that its noise picks."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, _PlacedRequest] = {}
        self._device = device

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``ValueError`` for a place that is none, or beside settings that change logits."""
        place = (sampling_params.extra_args or {}).get(PLACE)
        if place is None:
            return
        if not _is_place(place):
            raise ValueError(f"{PLACE}={place!r}: give [seed, ordinal, sample, position]")
        drawn_here = bool((sampling_params.extra_args or {}).get(DRAWN))
        plains = {**_PLAIN, "temperature": (0.0,)} if drawn_here else _PLAIN
        for name, plain in plains.items():
            if (found := getattr(sampling_params, name, plain[0])) not in plain:
                raise ValueError(
                    f"{name}={found!r} beside {PLACE}: log-probabilities would not be those of "
                    f"the tokens' distribution; give {name}={plain[0]}"
                )

    def is_argmax_invariant(self) -> bool:
        """Return False: it picks the token, also for vLLM's greedy sampling."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests of the batch."""
        process_dict_updates(self._requests, batch_update, _request)

    def apply(self, logits: Tensor) -> Tensor:
        """Let one token win in the rows [vocabulary] of requests with a place."""
        if not self._requests:
            return logits
        rows = sorted(self._requests)
        asked = logits if len(rows) == len(logits) else logits[rows]
        logits[rows, drawn(asked, self._noise(rows))] = torch.finfo(logits.dtype).max
        return logits

    def _noise(self, rows: list[int]) -> Tensor:
        """Return the noise [rows] of the next token of each row."""
        by_seed = defaultdict[int, list[int]](list)
        for number, row in enumerate(rows):
            by_seed[self._requests[row].seed].append(number)
        noise = np.empty(len(rows))
        for seed, numbers in by_seed.items():
            those = [self._requests[rows[number]] for number in numbers]
            noise[numbers] = uniform(
                seed,
                np.array([each.ordinal for each in those], dtype=np.int64),
                np.array([each.sample for each in those], dtype=np.int64),
                np.array([each.position + len(each.output) for each in those], dtype=np.int64),
            )
        return torch.from_numpy(noise).to(self._device)


def _request(
    params: SamplingParams, prompt: list[int] | None, output: list[int]
) -> _PlacedRequest | None:
    place = (params.extra_args or {}).get(PLACE)
    if place is None:
        return None
    seed, ordinal, sample, position = place
    return _PlacedRequest(seed, ordinal, sample, position, output)


def _is_place(place: object) -> bool:
    return (
        isinstance(place, list)
        and len(place) == 4
        and all(isinstance(each, int) and 0 <= each < 1 << 63 for each in place)
    )
