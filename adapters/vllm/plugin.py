"""The entry in every process of vLLM: outputs tell the weights' versions while they are streamed.

vLLM keeps, for each request, the token at which each version of the weights began, and tells it
with the last output alone. A server that is killed sends no last output.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

from holdfast.elastic.errors import ConfigError

NAME: Final = "holdfast"
"""The name by which ``VLLM_PLUGINS`` asks for the plug-in."""

TESTED: Final = "0.32"


def register() -> None:
    """Have each output of a request tell the versions of its tokens so far.

    It does nothing where ``VLLM_PLUGINS`` does not name Holdfast. Raises ``ConfigError`` for a vLLM
    that keeps the versions in another way.
    """
    from vllm import envs

    if NAME not in (envs.VLLM_PLUGINS or ()):
        return
    from vllm.v1.engine.output_processor import RequestState

    making = getattr(RequestState, "_new_completion_output", None)
    spans = getattr(RequestState, "_weight_version_spans", None)
    if making is None or spans is None:
        raise ConfigError(
            f"this vLLM does not keep the versions of tokens as vLLM {TESTED} does: install "
            f"vLLM {TESTED}"
        )
    if getattr(making, "tells_versions", False):
        return

    @wraps(making)
    def telling(state: Any, *given: Any, **named: Any) -> Any:
        output = making(state, *given, **named)
        output.weight_versions = spans(state)
        return output

    telling.tells_versions = True  # type: ignore[attr-defined]
    RequestState._new_completion_output = telling
