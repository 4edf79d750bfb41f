"""vLLM as a sampling engine: a server with Holdfast's plug-in (`holdfast.adapters.vllm`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from torch import Tensor

from holdfast.adapters.rl.engines.chunks import CompletionChunk
from holdfast.adapters.rl.engines.completions import CompletionServer, Load
from holdfast.adapters.rl.engines.protocol import TokenPlace
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.ckpt import checks
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.errors import ConfigError

_START: Final = (
    "VLLM_PLUGINS=holdfast vllm serve MODEL "
    "--worker-extension-cls holdfast.adapters.vllm.worker.HoldfastWorker "
    "--logits-processors holdfast.adapters.vllm.noise:PlacedNoise"
)


_OWN_RULES: Final[Mapping[str, checks.Rule]] = {
    "event_tokens": checks.count(1, remedy="give 1 or more tokens"),
}


@dataclass(kw_only=True)
class VLLMServer(CompletionServer):
    """The vLLM server at ``url`` with Holdfast's plug-in, which samples answers of ``limits``.

    ``load`` tells it a version, which it reads by itself: from ``weights``, into which they are put
    before, or from the place that its ``--additional-config`` names. A ``pinned`` answer is of one
    version: it breaks off when the weights change, and others go on under the new ones. Noise is
    drawn by the place of each token.

    ``event_tokens`` come with an event, the first one alone. A server that is lost then loses up to
    one token fewer of each answer, which another samples again, the same ones.
    """

    weights: WeightFolder | None = None
    pinned: bool = True
    event_tokens: int = 1
    model: str = field(default="", init=False)
    load_with: Load | None = field(default=None, init=False)
    temperature: float = field(default=1.0, init=False)
    by_place: bool = field(default=True, init=False)
    pause_path: str = field(default="/v1/holdfast/pause", init=False)
    resume_path: str = field(default="/v1/holdfast/resume", init=False)
    answer_path: ClassVar[str] = "/v1/holdfast/generate"
    loaded: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        checks.check_fields(self, _OWN_RULES, error=ConfigError)
        if self.version is None:
            self.load_with = self._load
        elif self.weights is not None:
            raise ConfigError(
                f"VLLMServer(version={self.version}, weights=...): give version= for weights that "
                "never change, or weights= for others"
            )
        CompletionServer.__post_init__(self)

    @property
    def takes_weights(self) -> bool:
        """True if `load` needs tensors; otherwise the server reads them by the version."""
        return self.weights is not None

    def _load(self, weights: Mapping[str, Tensor], version: int) -> None:
        place = {} if self.weights is None else self.weights.put(weights, version=version)
        answer = self._client.post(
            f"{self.url}/v1/holdfast/load", json={"version": version, **place}
        )
        self._check_status(answer)
        self.loaded = answer.json()

    def _body(self, ids: Sequence[int], place: TokenPlace, most: int) -> dict[str, Any]:
        return {
            "ids": list(ids),
            "most": most,
            "end": self.limits.end,
            "place": [place.seed, place.ordinal, place.sample, len(ids)],
            "pinned": self.pinned,
            "event_tokens": self.event_tokens,
        }

    def _check_status(self, answer: Any) -> None:
        if answer.status_code == 404:
            raise ConfigError(f"{self.url} is no vLLM with Holdfast's plug-in: start {_START} ...")
        super()._check_status(answer)

    def _version_of(self, chunk: CompletionChunk) -> int:
        if chunk.version is None and self.version is None:
            raise PeerError(f"{self.url} samples with the weights it began with: it was restarted")
        return super()._version_of(chunk)
