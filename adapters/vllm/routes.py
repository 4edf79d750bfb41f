"""The routes in vLLM's API server, below ``/v1/holdfast``, where its API keys are asked for.

``generate`` streams an answer, each event with its tokens' log-probabilities and the version of the
weights that sampled them. ``load`` has all workers read a version while requests go on, then stops
them for the swap alone; their caches are computed again under the new weights.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from holdfast.adapters.vllm.noise import DRAWN, PLACE

_POLL_S: Final = 0.005
_LOAD_S: Final = 600.0
_BROKEN: Final = "broken"
_EXTENSION: Final = "holdfast.adapters.vllm.worker.HoldfastWorker"
_NOISE: Final = "holdfast.adapters.vllm.noise:PlacedNoise"


class AskedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: what follows ``ids``, up to ``most`` tokens or the token ``end``.

    ``place`` is [seed, ordinal, sample, position] of the first token. A ``pinned`` answer is of one
    version: it ends when the weights change. Each event has ``event_tokens``, but for the first one
    and the last.
    """

    ids: list[int]
    most: int
    end: int
    place: list[int]
    pinned: bool
    event_tokens: int = 1


class AskedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights to load, see `WantedWeights`."""

    version: int
    folder: str = ""
    step: int | None = None

    def __post_init__(self) -> None:
        if "/" in self.folder or self.folder in (".", ".."):
            raise ValueError(f"folder {self.folder!r} is no name of a folder in the root")
        if self.version < 0:
            raise ValueError(f"version {self.version} is negative")


@dataclass(slots=True)
class HeldVersion:
    """The weights of the server: ``version`` None before the first load, and after a failed one."""

    version: int | None = None
    digest: str = ""
    is_broken: bool = False


@dataclass(slots=True)
class VLLMService:
    """The routes' work, with vLLM's client of its engine."""

    engine: Any
    context: int
    slots: int
    loaded: HeldVersion = field(default_factory=HeldVersion)
    is_paused: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def about(self, _: Request) -> JSONResponse:
        """Tell what this server is."""
        found = {"version": self.loaded.version, "context": self.context, "slots": self.slots}
        return JSONResponse({"holdfast": 1, **found})

    async def generate(self, request: Request) -> JSONResponse | StreamingResponse:
        """Stream an answer as events."""
        try:
            asked = msgspec.json.decode(await request.body(), type=AskedAnswer)
        except msgspec.DecodeError as error:
            return _refused(f"no request for an answer: {error}")
        if self.loaded.is_broken:
            return _refused("the last weights did not fit, load others", status=503)
        if asked.event_tokens < 1:
            return _refused(f"event_tokens is {asked.event_tokens}: give 1 or more")
        if asked.most < 1 or len(asked.ids) + asked.most > self.context:
            return _refused(
                f"{len(asked.ids)} tokens and {asked.most} more, and --max-model-len is "
                f"{self.context}: give the server more, or the limits less"
            )
        return StreamingResponse(self._events(asked), media_type="text/event-stream")

    async def load(self, request: Request) -> JSONResponse:
        """Read a version beside the requests, then swap it in; tell the cost."""
        try:
            asked = msgspec.json.decode(await request.body(), type=AskedWeights)
        except msgspec.DecodeError as error:
            return _refused(f"no version to load: {error}")
        async with self._lock:
            return await self._load(asked)

    async def pause(self, _: Request) -> JSONResponse:
        """Sample no token until `resume`."""
        async with self._lock:
            self.is_paused = True
            await self.engine.pause_generation(mode="keep", clear_cache=False)
        return JSONResponse({})

    async def resume(self, _: Request) -> JSONResponse:
        """Go on after `pause`."""
        async with self._lock:
            self.is_paused = False
            await self.engine.resume_generation()
        return JSONResponse({})

    async def _load(self, asked: AskedWeights) -> JSONResponse:
        told = await self._fetched(asked)
        if not told:
            return _refused(f"the weights were not read in {_LOAD_S:g} s", status=503)
        if errors := [each["error"] for each in told if each["error"]]:
            return _refused(errors[0], status=503)
        digests = {each["digest"] for each in told}
        if len(digests) > 1:
            return _refused(f"the workers read different weights: {sorted(digests)}", status=503)
        began_s, digest = time.perf_counter(), digests.pop()
        same = digest == self.loaded.digest and not self.loaded.is_broken
        if not (same and asked.version == self.loaded.version) and (
            why := await self._swap(asked.version, digest, same=same)
        ):
            return _refused(f"the weights do not fit the model of this server: {why}")
        return JSONResponse(
            {
                "version": asked.version,
                "read_bytes": sum(each["read_bytes"] for each in told),
                "kept_bytes": sum(each["kept_bytes"] for each in told),
                "read_s": max(each["seconds"] for each in told),
                "swap_s": time.perf_counter() - began_s,
            }
        )

    async def _fetched(self, asked: AskedWeights) -> list[dict[str, Any]]:
        """Have all workers read the weights; return what each tells, or nothing: it takes long."""
        await self._all("holdfast_fetch", msgspec.to_builtins(asked))
        deadline_s = time.monotonic() + _LOAD_S
        while time.monotonic() < deadline_s:
            told = await self._all("holdfast_fetched")
            if all(each["done"] for each in told):
                return told
            await asyncio.sleep(_POLL_S)
        return []

    async def _swap(self, version: int, digest: str, *, same: bool) -> str:
        """Put the weights that were read into all workers; return why they do not fit, if so."""
        loaded, engine = self.loaded, self.engine
        await engine.pause_generation(mode="keep", clear_cache=not same)
        try:
            whys = [] if same else [why for why in await self._all("holdfast_swap") if why]
            if whys:
                loaded.version, loaded.digest, loaded.is_broken = None, "", True
                await engine.update_weight_version(_BROKEN)
                return str(whys[0])
            await engine.update_weight_version(str(version))
            loaded.version, loaded.digest, loaded.is_broken = version, digest, False
        finally:
            if not self.is_paused:
                await engine.resume_generation()
        return ""

    async def _all(self, method: str, *given: Any) -> list[Any]:
        found: list[Any] = await self.engine.collective_rpc(method, args=given)
        return found

    async def _events(self, asked: AskedAnswer) -> AsyncIterator[str]:
        from vllm.inputs import TokensPrompt

        count, pin = 0, None
        prompt = TokensPrompt(prompt_token_ids=asked.ids)
        outputs = self.engine.generate(prompt, _params(asked), f"holdfast-{uuid.uuid4().hex}")
        try:
            async for result in outputs:
                (output,) = result.outputs
                for version, tokens, logprobs in _runs(output, count):
                    pin = version if pin is None else pin
                    if asked.pinned and version != pin:
                        yield _event([], [], version, "abort")
                        return
                    yield _event(tokens, logprobs, version, None)
                count += len(output.token_ids)
                if output.finish_reason is not None:
                    yield _event([], [], pin, output.finish_reason)
        finally:
            await outputs.aclose()
        yield "data: [DONE]\n\n"


class Endpoints:
    """The plug-in's entry in vLLM's API server (an ``EndpointPlugin``)."""

    name = "holdfast"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the routes."""
        for name, method in (
            ("", "GET"),
            ("/generate", "POST"),
            ("/load", "POST"),
            ("/pause", "POST"),
            ("/resume", "POST"),
        ):
            app.add_route(f"/v1/holdfast{name}", _handler(name[1:] or "about"), methods=[method])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Make the service. Raises ``ConfigError`` for a server that could load no weights."""
        from holdfast.elastic.errors import ConfigError

        config = engine_client.vllm_config
        if config.parallel_config.worker_extension_cls != _EXTENSION:
            raise ConfigError(
                f"vLLM was started without Holdfast's worker: give --worker-extension-cls "
                f"{_EXTENSION}"
            )
        if _NOISE not in map(str, config.model_config.logits_processors or ()):
            raise ConfigError(
                f"vLLM was started without Holdfast's noise: give --logits-processors {_NOISE}"
            )
        if config.use_v2_model_runner:
            raise ConfigError(
                "model runner V2 takes other logits processors: start vLLM with "
                "VLLM_USE_V2_MODEL_RUNNER=0"
            )
        if config.model_config.logprobs_mode != "raw_logprobs":
            raise ConfigError(
                f"--logprobs-mode {config.model_config.logprobs_mode}: the log-probabilities would "
                "not be those of the policy; leave it at raw_logprobs"
            )
        if config.speculative_config is not None:
            raise ConfigError(
                "speculative decoding: its tokens are not drawn by their places; start vLLM "
                "without --speculative-config"
            )
        state.holdfast = VLLMService(
            engine_client,
            context=config.model_config.max_model_len,
            slots=config.scheduler_config.max_num_seqs,
        )


def _handler(name: str) -> Any:
    async def handle(request: Request) -> Any:
        return await getattr(request.app.state.holdfast, name)(request)

    return handle


def _params(asked: AskedAnswer) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=asked.most,
        temperature=0.0,  # the noise leaves one token: vLLM needs none of its own
        logprobs=0,
        stop_token_ids=[asked.end],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={PLACE: asked.place, DRAWN: True},
        stream_interval=asked.event_tokens,
    )


def _runs(output: Any, start: int) -> Iterator[tuple[int | None, list[int], list[float]]]:
    """Yield the new tokens of an output, from number ``start`` on, by the version of each."""
    tokens = list(output.token_ids)
    for span in output.weight_versions or ():
        begin, end = max(span.start, start) - start, span.end - start
        if begin < min(end, len(tokens)):
            part = slice(begin, end)
            yield (
                _number(span.version),
                tokens[part],
                [
                    found[token].logprob
                    for token, found in zip(tokens[part], output.logprobs[part], strict=True)
                ],
            )


def _number(label: str) -> int | None:
    """Return the version of vLLM's label: None for the weights that the server began with."""
    if label == _BROKEN:
        return -1
    return int(label) if label.isdecimal() else None


def _event(
    tokens: list[int], logprobs: list[float], version: int | None, reason: str | None
) -> str:
    """Return an event in the form of a completion's."""
    choice = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": reason,
    }
    event = {"choices": [choice], "weight_version": version}
    return f"data: {msgspec.json.encode(event).decode()}\n\n"


def _refused(why: str, *, status: int = 400) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=status)
