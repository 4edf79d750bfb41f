"""A small server of OpenAI-style completions: a tiny model, which dies or hangs when it is told to.

python completion_server.py PORT [--pinned] [--tells] [--mute]
    [--die N | --hang N | --garble N | --wait N]

Policy version V has the weights that seed V makes; it begins with version 1. ``--tells`` has each
event say the version of its weights. After N tokens of all answers together the server kills
itself, stops itself, sends an event that is none, or waits for a version to load. With ``--mute``
it gives no token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.engines.built_in import BuiltInEngine
from holdfast.adapters.rl.engines.protocol import TokenPlace
from holdfast.adapters.rl.policy.model import build_model
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.weights.initial import build_policy

CONFIG = preset("tiny")
LIMITS = CONFIG.limits
FIRST = 1


def weights_of(version: int) -> Any:
    """Return the weights of a policy version."""
    return full_tensors(build_model(CONFIG.model, seed=version))


def engine(*, pinned: bool = True, slots: int = 4) -> BuiltInEngine:
    """Return an engine with the weights of the first version."""
    made = BuiltInEngine(build_policy(CONFIG), limits=LIMITS, slots=slots, pinned=pinned)
    made.load(weights_of(FIRST), version=FIRST)
    return made


class Service:
    """The routes of the server."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.engine, self.count = given, engine(pinned=given.pinned), 0

    async def completions(self, request: Request) -> EventSourceResponse:
        """Stream an answer."""
        body = await request.json()
        assert body["stream"]
        assert body["return_token_ids"]
        ids = body["prompt"]
        seed, ordinal, sample, position = body.get("holdfast_place", [7, body["seed"], 0, 0])
        assert position in (0, len(ids))
        place = TokenPlace(seed=seed, ordinal=ordinal, sample=sample, prompt=len(ids))
        return EventSourceResponse(self._events(ids, place, body["max_tokens"]))

    async def _events(self, ids: list[int], place: TokenPlace, most: int) -> AsyncIterator[str]:
        tokens = self.engine.generate(ids, place)
        try:
            async for event in self._told(tokens, most):
                yield event
        finally:
            tokens.close()

    async def _told(self, tokens: Any, left: int) -> AsyncIterator[str]:
        given = self.given
        async for token, logprob, version in iterate_in_threadpool(tokens):
            left -= 1
            over = token == LIMITS.end or not left
            choice: dict[str, Any] = {"index": 0, "text": "?", "finish_reason": None}
            if over:
                choice["finish_reason"] = "stop" if token == LIMITS.end else "length"
            choice["logprobs"] = {"token_logprobs": [logprob], "tokens": ["?"]}
            if not given.mute:
                choice["token_ids"] = [token]
            event: dict[str, Any] = {"object": "text_completion", "choices": [choice]}
            if given.tells:
                event["weight_version"] = version
            yield json.dumps(event)
            self.count += 1
            if self.count == given.wait:
                self.engine.pause()
            if self.count == given.die:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.count == given.hang:
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.count == given.garble:
                yield '{"choices": "none"'
                return
            if over:
                break
        yield "[DONE]"

    async def load(self, request: Request) -> JSONResponse:
        """Load the weights of a version."""
        version = int((await request.json())["version"])
        self.engine.load(weights_of(version), version=version)
        self.engine.resume()
        return JSONResponse({})

    async def pause(self, _: Request) -> JSONResponse:
        """Sample nothing."""
        self.engine.pause()
        return JSONResponse({})

    async def resume(self, _: Request) -> JSONResponse:
        """Go on."""
        self.engine.resume()
        return JSONResponse({})


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    for flag in ("--pinned", "--tells", "--mute"):
        parser.add_argument(flag, action="store_true")
    for name in ("--die", "--hang", "--garble", "--wait"):
        parser.add_argument(name, type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    service = Service(given)
    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/load", service.load, methods=["POST"]),
        Route("/pause", service.pause, methods=["POST"]),
        Route("/resume", service.resume, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=given.port, log_level="error")


if __name__ == "__main__":
    main()
