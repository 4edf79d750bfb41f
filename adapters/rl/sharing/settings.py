"""The settings of a run that shares its samples with others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from holdfast.adapters.rl.samples.tokens import Tokenizer, Tokens
from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea.settings import NAME

Score: TypeAlias = Callable[[Tokens, Tokens], Sequence[float]]
"""(prompt, answer) → the present policy's log-probabilities of the answer's tokens."""

MOST_KEPT: Final = 1024
_DIGEST_BYTES: Final = 16
_SCORES: Final = "give a function of prompt and answer, or None"


def _name(value: object) -> str:
    if isinstance(value, str) and NAME.fullmatch(value):
        return ""
    return "give up to 63 letters, digits, '.', '_' and '-' that begin with a letter or digit"


def _kept(value: object) -> str:
    is_right = checks.is_count(value, least=1) and isinstance(value, int) and value <= MOST_KEPT
    return "" if is_right else f"give 1 to {MOST_KEPT} groups"


def _tokenizer(value: object) -> str:
    parts = ("size", "end", "encode", "decode")
    is_one = value is None or all(hasattr(value, part) for part in parts)
    return "" if is_one else "give an object with size, end, encode and decode, or None"


def _score(value: object) -> str:
    return "" if value is None or callable(value) else _SCORES


_SHARED: Final[Mapping[str, checks.Rule]] = {
    "meet": checks.text(remedy=f"give {checks.ROOTS}, as a string"),
    "name": _name,
    "own": checks.count(1, remedy="give 1 or more groups of a step"),
    "others": checks.count(0, remedy="give 0 or more groups of a step"),
    "keep": _kept,
}
_RULES: Final[Mapping[str, checks.Rule]] = {
    **_SHARED,
    "family": checks.text(remedy="name the tokenizer and the model family, as a text"),
    "tokenizer": _tokenizer,
    "score": _score,
}


class ShareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a job that shares finished groups with others; see `Share` for the fields.

    ``family`` may be left out for the built-in model.
    """

    meet: str
    name: str
    own: int
    others: int
    keep: int = 64
    family: str = ""

    def __post_init__(self) -> None:
        checks.check_fields(self, _SHARED, error=ArgumentError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This run's part in a pool of finished samples that several runs fill and draw from.

    SAPO: "Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing"
    (Amico et al., 2025, arXiv:2509.08721). All runs ``meet`` at one place: a directory,
    ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``; that of a sea of
    islands serves as well. ``name`` tells this run from the others. Each step trains on ``own``
    groups of this run, and on up to ``others`` that other runs sampled; together they are the
    ``groups`` of the plan. A step never waits for others: with fewer groups its batch is smaller.
    The run's newest ``keep`` groups stay in the pool.

    ``family`` names tokenizer and model family in your own words. Two runs of the same family use
    each other's tokens and log-probabilities. Samples of another family are left out, unless both
    runs have a ``tokenizer`` (an object with ``size``, ``end``, ``encode`` and ``decode``) and this
    one has a ``score``: they are then encoded again from their texts, and ``score(prompt, answer)``
    gives the log-probabilities under the present policy. All ranks call it, with the same samples
    in the same order.
    """

    meet: str
    name: str
    own: int
    others: int
    family: str
    keep: int = 64
    tokenizer: Tokenizer | None = None
    score: Score | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ConfigError)
        if self.score is not None and self.tokenizer is None:
            raise ConfigError("Share(score=..., tokenizer=None): give the tokenizer as well")

    @property
    def digest(self) -> str:
        """The digest of ``family`` that others compare with theirs."""
        return hashlib.blake2b(self.family.encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def check_groups(self, groups: int) -> None:
        """Raise ``ConfigError`` unless a step of ``groups`` groups is what this says."""
        if remedy := fits(self, groups):
            raise ConfigError(remedy)


def fits(share: Share | ShareConfig, groups: int) -> str:
    """Return the remedy if a step of ``groups`` groups is not what ``share`` says, else nothing."""
    if share.own + share.others == groups:
        return ""
    return (
        f"own={share.own} and others={share.others}, but a step of the plan has {groups} groups: "
        f"give numbers that add up to {groups}"
    )
