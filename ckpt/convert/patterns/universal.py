"""Patterns from DeepSpeed's ``universal_checkpoint_info``, whose keys they match one to one. Pure.

The names of pieces are the ranks of tensor parallelism and the parameter's name, in the caller's
form. Parameters that no key mentions are fragments of dim 0, as DeepSpeed merges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.ckpt.convert.patterns.language import (
    PatternFile,
    PatternStep,
    PiecePattern,
    Trim,
    make_pattern,
)
from holdfast.ckpt.errors import ArgumentError

PIECES: Final = "{tp}.{name...}"
WHOLE: Final = "{name...}"

_REPLICATED: Final = "tp_replicated_parameter_patterns"
_AVERAGED: Final = "parameter_to_average_patterns"
_ROWS: Final = "parameter_with_row_parallelism_patterns"
_HALVES: Final = "parameter_with_2_sub_params_cat_dim_0"
_SUBS: Final = "parameter_with_sub_params"
_VOCABULARY: Final = "vocabulary_parameter_patterns"
_VOCABULARY_SIZE: Final = "original_vocab_size"
_IGNORED: Final = frozenset(
    {"universal_checkpoint_version", "pipeline_replicated_parameter_patterns"}
)
"""Keys about other things than slices of tensor parallelism."""

_KEYS: Final = frozenset(
    {_REPLICATED, _AVERAGED, _ROWS, _HALVES, _SUBS, _VOCABULARY, _VOCABULARY_SIZE}
)


def universal_patterns(
    info: Mapping[str, Any], *, origin: str, pieces: str = PIECES, whole: str = WHOLE
) -> PatternFile:
    """Return the patterns of a mapping as DeepSpeed stores it.

    ``pieces`` and ``whole`` are names with the holes ``{tp}`` and ``{name...}``, and ``{name...}``.
    DeepSpeed's patterns are regular expressions for the start of a parameter's name. Raises
    ``ArgumentError`` naming ``origin`` for a key or a value that is not known.
    """
    if unknown := info.keys() - _KEYS - _IGNORED:
        raise ArgumentError(
            f"{origin}: the key {min(unknown)} is not known; known are {', '.join(sorted(_KEYS))}"
        )
    maker = _PatternMaker(origin, pieces=pieces, whole=whole)
    found = [
        maker.pattern(_REPLICATED, _texts(info, _REPLICATED, origin), _over("replicate")),
        maker.pattern(_AVERAGED, _texts(info, _AVERAGED, origin), _over("average")),
        maker.pattern(_ROWS, _texts(info, _ROWS, origin), _over("fragment", axis=1)),
        maker.pattern(_HALVES, _texts(info, _HALVES, origin), _over("fragment", sub=(1, 1))),
    ]
    if texts := _texts(info, _VOCABULARY, origin):
        size = info.get(_VOCABULARY_SIZE)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ArgumentError(f"{origin}: {_VOCABULARY_SIZE} is {size!r}; give a whole number")
        trim = Trim(to=size, padding="drop")
        found.append(maker.pattern(_VOCABULARY, texts, _over("fragment"), trim=trim))
    for sub in info.get(_SUBS) or ():
        found.append(maker.sub_params(sub))
    rest = make_pattern(
        label=f"{origin}: all others",
        pieces=pieces,
        whole=whole,
        join=(_over("fragment"),),
        otherwise=True,
    )
    return PatternFile(origin=origin, patterns=(*filter(None, found), rest))


def _over(kind: str, *, axis: int = 0, sub: Sequence[int] = ()) -> PatternStep:
    return PatternStep(over="tp", kind=kind, axis=axis, sub=tuple(sub))


def _texts(info: Mapping[str, Any], key: str, origin: str) -> list[str]:
    found = info.get(key) or []
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ArgumentError(f"{origin}: {key} is {found!r}; give a list of regular expressions")
    return list(found)


class _PatternMaker:
    def __init__(self, origin: str, *, pieces: str, whole: str) -> None:
        self._origin, self._pieces, self._whole = origin, pieces, whole

    def pattern(
        self, key: str, texts: Sequence[str], step: PatternStep, *, trim: Trim | None = None
    ) -> PiecePattern | None:
        """Return the pattern of the names whose start matches one of ``texts``; None for none."""
        if not texts:
            return None
        return make_pattern(
            label=f"{self._origin}: {key}",
            pieces=self._pieces,
            whole=self._whole,
            join=(step,),
            trim=trim,
            where={"name": "|".join(f"(?:{text}).*" for text in texts)},
        )

    def sub_params(self, sub: Any) -> PiecePattern | None:
        """Return the pattern of one ``SubparamShape``, which may be a dict of its fields."""
        names = ("patterns", "shape", "partition_dim")
        fields = sub if isinstance(sub, Mapping) else {k: getattr(sub, k, None) for k in names}
        texts, shape, dim = (fields.get(name) for name in names)
        if not isinstance(shape, list | tuple) or not isinstance(dim, int):
            raise ArgumentError(
                f"{self._origin}: {_SUBS}: {sub!r} has no shape and partition_dim; save it again"
            )
        parts = shape[dim] if 0 <= dim < len(shape) else None
        widths = parts if isinstance(parts, list | tuple) else (1,)
        if not all(isinstance(each, int) and each > 0 for each in widths):
            raise ArgumentError(f"{self._origin}: {_SUBS}: widths {widths!r}; give whole numbers")
        named = _texts({"patterns": texts}, "patterns", self._origin)
        return self.pattern(_SUBS, named, _over("fragment", axis=dim, sub=widths))
