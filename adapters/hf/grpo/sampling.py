"""The sampling of rounds: each chunk on one rank, then scored as one batch on every rank.

TRL samples, rewards and scores a round in one call, `_generate_and_score_completions`. Here that
call is made twice. First for each chunk, by the rank of its microbatch and under a seed of its own:
it gives completions and rewards. Then for the whole round, with these in place of sampling, on
every rank alike: it gives advantages, metrics and the slices. The log-probabilities in it are
computed slice by slice, each on one rank. So nothing depends on the number of ranks. If the
rollout ledger has the completions of a round, its chunks give rewards alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from holdfast.adapters.hf.grpo.exchange import of_all_microbatches
from holdfast.adapters.hf.grpo.finished import FinishedWork
from holdfast.adapters.hf.grpo.ledger_rounds import LedgerOfRounds
from holdfast.adapters.hf.grpo.prompts import Prompts
from holdfast.adapters.hf.grpo.shape import RoundShape
from holdfast.adapters.hf.grpo.values import decode, encode
from holdfast.adapters.hf.kept import metrics_of
from holdfast.adapters.hf.ranks import as_only_process
from holdfast.adapters.shared.broadcasting import from_leader
from holdfast.ckpt import state_hash
from holdfast.elastic import Run, session_of
from holdfast.elastic.randomness import stream_seed
from holdfast.elastic.seeding import seed_all

_SAMPLED: Final = "sampled"
_SCORED: Final = "scored"

Round = tuple[int, int]
"""The epoch of a round, and its number in it."""


class RoundSampler:
    """Samples the rounds of one generation; ``finished`` keeps what a loss must not repeat.

    With a ``ledger`` the completions are drawn from it; then a step has one round.
    """

    def __init__(
        self,
        trainer: Any,
        run: Run,
        shape: RoundShape,
        *,
        prompts: Prompts,
        finished: FinishedWork,
        ledger: LedgerOfRounds | None = None,
    ) -> None:
        self._trainer, self._run, self._shape = trainer, run, shape
        self._prompts, self._finished, self._ledger = prompts, finished, ledger
        self._seed = session_of(run).seed

    def sample(self, rounds: list[Round]) -> list[list[dict[str, Any]]]:
        """Return the slices of each round; collective, between the passes of a step."""
        rows = [self._prompts.rows(*each) for each in rounds]
        self._trainer.model.train()  # as TRL does before it samples
        with self._run.pause(), as_only_process(self._trainer):
            drawn = None if self._ledger is None else self._ledger.draw()
            done = self._sampled(rounds, rows, drawn)
            found = []
            for number, each in enumerate(rounds):
                seed_all(stream_seed(self._seed, "round", *each))
                found.append(self._scored(rows[number], done[number]))
        return found

    # -- chunks ----------------------------------------------------------------------------------

    def _sampled(
        self, rounds: list[Round], rows: list[Any], drawn: list[dict[str, Any]] | None
    ) -> list[list[dict[str, Any]]]:
        """Return what the chunks of each round gave, in order, on every rank.

        ``drawn`` has the completions of each chunk of the only round, if the ledger has them.
        """
        run, shape = self._run, self._shape
        begin, known = self._known()
        mine = []
        for microbatch in run.microbatches():
            done = {}
            for index in range(microbatch, len(rounds) * shape.chunks, shape.microbatches):
                number, chunk = divmod(index, shape.chunks)
                part = rows[number][chunk * shape.chunk : (chunk + 1) * shape.chunk]
                name = "/".join(map(str, (*rounds[number], chunk)))
                run.check()
                given = None if drawn is None else drawn[chunk]
                done[str(index)] = self._chunk(name, part, begin=begin, known=known, given=given)
            mine.append(encode(done, what="a chunk"))
        everything: dict[str, Any] = {}
        for data in of_all_microbatches(run, mine):
            everything |= decode(data)
        return [
            [everything[str(number * shape.chunks + chunk)] for chunk in range(shape.chunks)]
            for number in range(len(rounds))
        ]

    def _known(self) -> tuple[str, dict[str, bytes]]:
        """Return the begin of the present step's keys, and its entries that are in logs."""
        run, told = self._run, {}
        if run.is_leader:
            model = self._trainer.model
            weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
            begin = f"{run.completed}/{session_of(run).stage}/{state_hash(weights)[:32]}/"
            found = {key: data.decode() for key, data in self._finished.found(begin).items()}
            told = {"begin": begin, "found": found, "over": self._finished.is_over}
        answer = decode(from_leader(run, encode(told, what="a log")))
        if answer["over"]:
            self._finished.forget_lost()
        return answer["begin"], {key: text.encode() for key, text in answer["found"].items()}

    def _chunk(
        self,
        name: str,
        rows: Any,
        *,
        begin: str,
        known: dict[str, bytes],
        given: dict[str, Any] | None,
    ) -> Any:
        """Return completions and rewards of one chunk, from a log as far as they are there.

        ``given`` are its completions, if they are known. Only rewards of these are found again.
        """
        trainer = self._trainer
        mark = "" if given is None else f"/{_digest(given)}"

        def once(stage: str, work: Callable[[], Any]) -> Any:
            key = f"{name}/{stage}{mark}"
            if (data := known.get(key)) is None:
                seed_all(stream_seed(self._seed, "completions", f"{name}/{stage}"))
                data = encode(work(), what=f"the result of {stage}")
                self._finished.append(f"{begin}{key}", data)
            return decode(data)

        made: dict[str, Any] = {}
        turn, roll, rewards = _calls(trainer)

        def generate(*args: Any, **more: Any) -> Any:
            made["turn"] = once(_SAMPLED, lambda: list(turn(*args, **more)))
            return tuple(made["turn"])

        def rollout(*args: Any, **more: Any) -> Any:
            if given is None:
                made["rollout"] = once(_SAMPLED, lambda: dict(roll(*args, **more)))
            else:
                made["rollout"] = given
            return dict(made["rollout"])

        def reward(*args: Any, **more: Any) -> Any:
            def work() -> dict[str, Any]:
                trainer._pending_metrics.clear()
                found = rewards(*args, **more)
                return {"rewards": found, "metrics": dict(trainer._pending_metrics)}

            made.update(once(_SCORED, work))
            return made["rewards"]

        with _in_place(trainer, generate, rollout, reward, logps=_no_logps), _unseen(trainer):
            trainer._generate_and_score_completions(rows)
        return made

    # -- rounds ----------------------------------------------------------------------------------

    def _scored(self, rows: Any, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the slices of a round from the results of its chunks."""
        trainer = self._trainer

        def generate(*_: Any, **__: Any) -> Any:
            ids = [each for chunk in chunks for each in chunk["turn"][0]]
            given = [chunk["turn"][1] for chunk in chunks]
            return ids, None if None in given else [each for some in given for each in some]

        def rollout(*_: Any, **__: Any) -> Any:
            return _united([chunk["rollout"] for chunk in chunks])

        def reward(*_: Any, **__: Any) -> Any:
            for chunk in chunks:
                for name, values in chunk["metrics"].items():
                    trainer._pending_metrics[name].extend(values)
            return torch.cat([chunk["rewards"] for chunk in chunks]).to(trainer.args.device)

        whole = trainer._get_per_token_logps_and_entropies
        logps = self._spread(whole)
        trainer._step, trainer._buffered_inputs = 0, None
        with _in_place(trainer, generate, rollout, reward, logps=logps):
            trainer._prepare_inputs(rows)
        slices = [{key: _apart(each) for key, each in s.items()} for s in trainer._buffered_inputs]
        trainer._buffered_inputs = None
        return slices

    def _spread(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like ``whole`` that has each slice computed by one rank."""
        run, shape = self._run, self._shape

        def logps(model: Any, ids: Any, mask: Any, keep: int, **more: Any) -> Any:
            more = {key: each for key, each in more.items() if each is not None}
            if more.keys() - {"batch_size"}:  # images, whose rows are no rows of the batch
                return whole(model, ids, mask, keep, **more)
            mine = []
            for microbatch in run.microbatches():
                rows = torch.zeros(-(-shape.slices // shape.microbatches), shape.rows, keep)
                for at, part in enumerate(range(microbatch, shape.slices, shape.microbatches)):
                    run.check()
                    chosen = slice(part * shape.rows, (part + 1) * shape.rows)
                    rows[at] = whole(model, ids[chosen], mask[chosen], keep, **more)[0].float()
                mine.append(rows)
            table = run.gather(mine)  # [microbatches, turns, rows, keep]
            ordered = table.transpose(0, 1).reshape(-1, keep)
            return ordered[: shape.completions].to(ids.device), None, None

        return logps


def _digest(given: dict[str, Any]) -> str:
    return hashlib.sha256(encode(given, what="completions")).hexdigest()[:32]


def _apart(value: Any) -> Any:
    """Return a tensor with memory of its own."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _calls(trainer: Any) -> tuple[Any, Any, Any]:
    return trainer._generate_single_turn, trainer.rollout_func, trainer._calculate_rewards


def _no_logps(model: Any, ids: Any, mask: Any, keep: int, **_: Any) -> Any:
    return torch.zeros(len(ids), keep), None, None


def _united(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the output of one call from those for parts; of other values than lists, the first."""
    found: dict[str, Any] = {}
    for key, first in outputs[0].items():
        rows = [output[key] for output in outputs] if isinstance(first, list) else None
        found[key] = first if rows is None else [each for some in rows for each in some]
    return found


@contextmanager
def _in_place(
    trainer: Any, generate: Any, rollout: Any, reward: Any, *, logps: Any
) -> Iterator[None]:
    """Let the Trainer call these functions for sampling, for rewards and for log-probabilities."""
    roll = trainer.rollout_func
    trainer._generate_single_turn, trainer._calculate_rewards = generate, reward
    trainer._get_per_token_logps_and_entropies = logps
    if roll is not None:
        trainer.rollout_func = rollout
    try:
        yield
    finally:
        trainer.rollout_func = roll
        del trainer._generate_single_turn, trainer._calculate_rewards
        del trainer._get_per_token_logps_and_entropies


@contextmanager
def _unseen(trainer: Any) -> Iterator[None]:
    """Undo what a call counts and collects: the call for the whole round does it again."""
    state, metrics = trainer.state, metrics_of(trainer)
    seen = state.num_input_tokens_seen
    before = {key: list(values) for key, values in metrics.items()}
    try:
        yield
    finally:
        state.num_input_tokens_seen = seen
        trainer._pending_metrics.clear()
        trainer._pending_extra_logs.clear()
        metrics.clear()
        metrics.update(before)
