"""The files of DeepSpeed's checkpoint directories, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import CorruptError, NotFoundError, StateError, StoreError
from holdfast.ckpt.store.places import scheme_of
from holdfast.ckpt.store.refusals import refusals
from holdfast.ckpt.store.regular import read_regular

LATEST: Final = "latest"
LATEST_UNIVERSAL: Final = "latest_universal"
PARAMETERS: Final = "zero"
"""The folder of a universal directory that has a folder for each parameter."""
OPTIMIZER: Final = "optimizer_state.pt"

_OPTIM: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_?optim_states\.pt"
)
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
_OTHERS: Final = re.compile(r"(?:layer|expert)_.*\.pt")
_TAG_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The files of one tag: ``models`` and ``optimizers`` in the order of the ranks.

    ``per_rank`` says whether each rank wrote its model states (stage 3) or one did for all.
    """

    tag: Path
    models: Sequence[Path]
    optimizers: Sequence[Path]
    per_rank: bool


def is_zero(path: str) -> bool:
    """Say whether a directory is a tag of a ZeRO checkpoint, or a root that names its latest."""
    if scheme_of(path) or not Path(path).is_dir():
        return False
    return any(map(_OPTIM.fullmatch, _names(Path(path)))) or (Path(path) / LATEST).is_file()


def is_universal(path: str) -> bool:
    """Say whether a directory is a tag of a universal checkpoint, or a root of one."""
    if scheme_of(path) or not Path(path).is_dir():
        return False
    return any(
        (Path(path) / name).is_file() for name in (f"{PARAMETERS}/{OPTIMIZER}", LATEST_UNIVERSAL)
    )


def tag_of(path: str | Path, *, latest: str) -> Path:
    """Return the directory of the tag: ``path``, or the one that its file ``latest`` names."""
    if scheme_of(path):
        raise StoreError(
            f"{path}: DeepSpeed's checkpoints are read from directories; copy it first"
        )
    root = Path(path)
    if not root.is_dir():
        raise NotFoundError(f"{path}: is no directory; give the one passed to save_checkpoint")
    if not (root / latest).exists():
        return root
    raw = read_regular(root / latest, most_bytes=_TAG_BYTES)
    name = raw.decode(errors="replace").strip()
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        raise CorruptError(
            f"{root / latest}: names {name!r}, which is no directory beside it; give the "
            "directory of the tag"
        )
    if not (root / name).is_dir():
        raise NotFoundError(f"{root / latest}: names {name!r}, which is not there; give a tag's")
    return root / name


def rank_files(tag: Path, *, optimizers: bool) -> RankFiles:
    """Return the files of a tag, complete and in the order of their ranks.

    Raises ``NotFoundError`` naming files that are missing, and ``StateError`` for the files of
    tensor, pipeline and expert parallelism.
    """
    names = _names(tag)
    _refuse_other_axes(tag, names)
    models = [(m, name) for name in names if (m := _MODEL.fullmatch(name))]
    whole = [name for m, name in models if m[1] is None]
    found = _by_rank(tag, [(int(m[1]), name) for m, name in models if m[1] is not None])
    optims = _by_rank(tag, [(int(m[1]), name) for name in names if (m := _OPTIM.fullmatch(name))])
    if not whole and not found:
        raise NotFoundError(
            f"{tag}: has no *_model_states.pt; give the directory of a tag, or one whose file "
            f"{LATEST} names a tag"
        )
    if optimizers and not optims:
        raise StateError(
            f"{tag}: has no *_optim_states.pt: it was saved without ZeRO. Convert "
            f"{(whole or found)[0]} with --from torch --select 'module.*'"
        )
    return RankFiles(
        tag=tag,
        models=[tag / name for name in whole or found],
        optimizers=[tag / name for name in optims],
        per_rank=not whole,
    )


def _names(tag: Path) -> list[str]:
    with refusals(tag, "list it", reading=True):
        return sorted(path.name for path in tag.iterdir())


def _refuse_other_axes(tag: Path, names: Sequence[str]) -> None:
    for name in names:
        match = _OPTIM.fullmatch(name) or _MODEL.fullmatch(name)
        if _OTHERS.fullmatch(name) or (match and int(match[2])):
            kind = "pipeline or expert" if match is None else "tensor or pipeline"
            raise StateError(
                f"{tag / name}: the checkpoint was saved with {kind} parallelism, which is not "
                "read. Save it again with data parallelism only, or export its weights with "
                "the code that wrote it"
            )


def _by_rank(tag: Path, found: Sequence[tuple[int, str]]) -> list[str]:
    """Return the names in the order of the ranks. Raises for two of one rank, or a gap."""
    names: dict[int, str] = {}
    for rank, name in found:
        if rank in names:
            raise CorruptError(
                f"{tag}: {names[rank]} and {name} are of the same rank: two checkpoints lie in "
                "one directory. Remove the files of the older one"
            )
        names[rank] = name
    lost = [rank for rank in range(max(names, default=-1) + 1) if rank not in names]
    if lost:
        like = names[max(names)].replace(f"rank_{max(names)}_", f"rank_{lost[0]}_", 1)
        raise NotFoundError(
            f"{tag}: {like} is missing ({len(lost)} of {max(names) + 1} ranks are); copy the "
            "files of every node into one directory"
        )
    return [names[rank] for rank in sorted(names)]
