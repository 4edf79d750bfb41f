"""The part in vLLM's workers: they read weights beside the requests, and take them in between.

Given on the command line as ``--worker-extension-cls``. The API server calls these methods on every
worker.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.adapters.vllm.sources import FetchedWeights, WantedWeights, WeightsSource, source_of
from holdfast.ckpt.errors import HoldfastError


@dataclass(slots=True)
class _Fetch:
    """A fetch on a thread of its own: what it found, or the error it ended with."""

    source: WeightsSource
    wanted: WantedWeights
    found: FetchedWeights | None = None
    error: str = ""
    seconds: float = 0.0

    def run(self) -> None:
        began_s = time.perf_counter()
        try:
            self.found = self.source.fetch(self.wanted)
        except HoldfastError as error:
            self.error = f"{type(error).__name__}: {error}"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.seconds = time.perf_counter() - began_s


class HoldfastWorker:
    """Methods that vLLM adds to its worker."""

    vllm_config: Any
    model_runner: Any

    def holdfast_fetch(self, wanted: dict[str, Any]) -> None:
        """Begin to read a version of the weights; requests go on."""
        state = self.__dict__
        if "_holdfast_source" not in state:
            state["_holdfast_source"] = source_of(self.vllm_config.additional_config)
        fetch = _Fetch(state["_holdfast_source"], msgspec.convert(wanted, WantedWeights))
        thread = threading.Thread(target=fetch.run, daemon=True)
        state["_holdfast_fetch"] = fetch, thread
        thread.start()

    def holdfast_fetched(self) -> dict[str, Any]:
        """Return how far the reading is: ``done``, with its ``error`` or digest and cost."""
        fetch, thread = self.__dict__["_holdfast_fetch"]
        if thread.is_alive():
            return {"done": False}
        if (found := fetch.found) is None:
            return {"done": True, "error": fetch.error}
        return {
            "done": True,
            "error": "",
            "digest": found.digest,
            "read_bytes": found.read_bytes,
            "kept_bytes": found.kept_bytes,
            "seconds": fetch.seconds,
        }

    def holdfast_swap(self) -> str:
        """Put the weights that were read into the model; return why they do not fit, or nothing.

        No request may run. After weights that do not fit the model is of no use.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        fetch, _ = self.__dict__["_holdfast_fetch"]
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        try:
            with set_current_vllm_config(self.vllm_config):
                initialize_layerwise_reload(model)
                try:
                    loaded = model.load_weights(iter(fetch.found.tensors.items()))
                finally:
                    finalize_layerwise_reload(model, self.vllm_config.model_config)
        except Exception as error:  # noqa: BLE001 - models raise what they like; the server tells it
            return f"{type(error).__name__}: {error}"
        missing = sorted(expected - set(loaded)) if loaded is not None else []
        return f"no weights for {', '.join(missing[:5])}" if missing else ""
