"""An environment behind plain HTTP: two addresses that take and return JSON.

``POST URL/prompt`` takes ``{"ordinal": 3, "seed": 7}`` and returns ``{"prompt": "..."}``. ``POST
URL/respond`` takes the fields of an `Action` and the seed, and returns those of an `Observation`.
"""

from __future__ import annotations

from typing import Final

from holdfast.adapters.rl.environments.base import Action, Observation, ToolError
from holdfast.adapters.rl.environments.remote.answers import (
    check_status,
    check_url,
    http_client,
    observation_of,
    patiently,
    prompt_of,
    request_of,
)
from holdfast.ckpt.types import Json

_PATIENCE_S: Final = 30.0


class HttpEnvironment:
    """The environment at ``url``; a server that is silent for ``silence_s`` counts as failed.

    A server that is not there or fails costs an attempt of the call; one that refuses the request
    (a status of 400 to 499) ends the worker.
    """

    def __init__(
        self,
        *,
        seed: int,
        url: str,
        silence_s: float = 60.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._seed = seed
        self._url = check_url(url, source="environment 'http'")
        self._http, self._client = http_client(silence_s=silence_s, headers=headers or {})

    def prompt(self, ordinal: int) -> str:
        """Return the server's prompt."""

        def ask() -> str:
            found = self._post("prompt", {"ordinal": ordinal, "seed": self._seed})
            return prompt_of(found, source=self._url)

        return patiently(ask, patience_s=_PATIENCE_S)

    def respond(self, action: Action) -> Observation:
        """Return the server's reply."""
        found = self._post("respond", request_of(action, seed=self._seed))
        return observation_of(found, source=self._url)

    def _post(self, path: str, body: dict[str, Json]) -> object:
        try:
            answer = self._client.post(f"{self._url}/{path}", json=body)
            check_status(answer.status_code, answer.text, source=f"{self._url}/{path}")
            found: object = answer.json()
        except self._http.HTTPError as error:
            raise ToolError(f"{self._url}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ToolError(f"{self._url}/{path} answered garbage ({error})") from error
        return found
