"""The entry in every process of vLLM: outputs tell the weights' versions while they are streamed.

vLLM keeps, for each request, the token at which each version of the weights began, and tells it
with the last output alone. A server that is killed sends no last output.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

from holdfast.elastic.errors import ConfigError

TESTED: Final = "0.32"


def register() -> None:
    """Have each output of a request tell the versions of its tokens so far.

    Raises ``ConfigError`` for a vLLM that keeps them in another way.
    """
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
