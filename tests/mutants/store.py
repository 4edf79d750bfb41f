"""Bugs of the checkpoint store, found by a small job that repeatedly loses its memory.

Production writers save every second step, in half of the seeds as differences to the previous
checkpoint, and old steps are removed. Under a seed files of the newest step are damaged, a save is
left half done, or a saver of an older generation comes late. Then the job restarts on another
number of ranks from the newest checkpoint that can be trusted.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from doubles.pruning import prune

from holdfast.ckpt.checkpoints.catalog import committed_steps, step_folder, verified
from holdfast.ckpt.checkpoints.commit import PackOptions, WriterReceipt, commit, write_pack
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CkptError, FencedError, NotFoundError
from holdfast.ckpt.state.restore import restore
from mutants.bug import Bug
from mutants.training import SmallJobHistory, judged, new_state, shards, steps_of, tell_step, train

_STEPS: Final = 10
_EVERY: Final = 2
_KEEP: Final = 2
_KINDS: Final = ("nothing", "flip", "flip", "cut", "unlink", "half", "late")


def trial(seed: int) -> str:
    """Run the job of a seed; return the defect of its history, or ""."""
    with tempfile.TemporaryDirectory(prefix="planted-store-") as folder:
        job = _StoreJob(seed, Path(folder))
        job.run()
    undone_most = 2 * _EVERY - 1  # the newest checkpoint may be damaged, not the one before
    return judged(
        job.reported, steps=_STEPS, width=job.width, ranks_most=4, undone_most=undone_most
    )


class _StoreJob:
    """The job of a seed; ``reported`` is its history."""

    def __init__(self, seed: int, root: Path) -> None:
        self._draw, self._root = random.Random(f"planted store {seed}"), root
        self.reported = SmallJobHistory()
        self.width = self._draw.choice((40, 700))
        self._state = new_state(self.width)
        self._incremental = self._draw.random() < 0.5
        self._generation, self._ranks = 1, self._draw.randint(1, 4)
        at = self._draw.sample(range(_EVERY * 2, _STEPS), 2)
        self._strikes = {step: self._draw.choice(_KINDS) for step in at}

    def run(self) -> None:
        """Train to the end, under all faults."""
        while steps_of(self._state) < _STEPS:
            train(self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported)
            tell_step(
                self._state, ranks=self._ranks, attempt=self._generation, reported=self.reported
            )
            step = steps_of(self._state)
            if step % _EVERY == 0:
                self._save()
            if kind := self._strikes.pop(step, ""):
                self._hurt(kind)
                self._start_anew()

    def _save(self) -> None:
        self._commit(self._write(ranks=self._ranks, generation=self._generation))
        prune(self._root, keep_last=_KEEP)

    def _commit(self, receipts: list[WriterReceipt]) -> None:
        first = receipts[0]
        commit(
            self._root,
            run=first.run,
            step=first.step,
            generation=first.generation,
            receipts=receipts,
            mesh={"dp": len(receipts)},
        )

    def _write(self, *, ranks: int, generation: int) -> list[WriterReceipt]:
        step = steps_of(self._state)
        there = [each for each in committed_steps(self._root) if each < step]
        options = PackOptions(base=there[-1] if there and self._incremental else None)
        return [
            write_pack(
                self._root, step=step, index=index, payload=memoryview(data), options=options
            )
            for index, data in shards(self._state, ranks=ranks, generation=generation)
        ]

    def _start_anew(self) -> None:
        """Lose all memory, and load the newest checkpoint that can be trusted."""
        self._generation, self._ranks = self._generation + 1, self._draw.randint(1, 4)
        self._state = new_state(self.width)
        with suppress(NotFoundError):
            for step in verified(self._root):
                with suppress(CkptError), StoreSource(self._root, step) as source:
                    restore(self._state, source, rank=0)
                    return
        self._state = new_state(self.width)

    def _hurt(self, kind: str) -> None:
        newest = committed_steps(self._root)[-1]
        if kind == "half":
            self._save_half()
        elif kind == "late":
            self._save_late()
        elif kind != "nothing":
            self._damage(kind, self._root / step_folder(newest))

    def _damage(self, kind: str, folder: Path) -> None:
        """Flip a bit of a file of the newest checkpoint, cut it off, or remove it."""
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        wanted = ("pack", "json") if kind == "flip" else ("pack",)
        there = [each for each in files if each.suffix[1:] in wanted and each.stat().st_size]
        path = self._draw.choice(there)
        data = bytearray(path.read_bytes())
        path.unlink()
        if kind == "unlink":
            return
        if kind == "cut":
            data = data[: self._draw.randrange(len(data))]
        else:
            data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        path.write_bytes(data)

    def _save_half(self) -> None:
        """Write the packs of the next checkpoint without the commit, as a stop in between does."""
        train(self._state, ranks=self._ranks, attempt=self._generation, reported=SmallJobHistory())
        self._write(ranks=self._ranks, generation=self._generation)

    def _save_late(self) -> None:
        """Commit a save of this generation after the next one has committed the same step."""
        late = self._write(ranks=self._ranks, generation=self._generation)
        self._generation += 1
        self._commit(self._write(ranks=self._ranks, generation=self._generation))
        with suppress(FencedError):
            self._commit(late)
            raise AssertionError(
                f"generation {late[0].generation} replaced step {late[0].step} of generation "
                f"{self._generation}"
            )


# -- the bugs --------------------------------------------------------------------------------------


def _checks_no_chunk(_real: Any) -> Any:
    return lambda self, found, wanted, *, at=0: None


def _takes_a_chunk_for_unchanged(real: Callable[..., Any]) -> Any:
    def known_as(self: Any, fqn: str, chunk: Any) -> Any:
        known = self._known.get((fqn, chunk.box))
        if known is None:
            return None
        _, _, old = known
        same = {name: getattr(old, name) for name in ("nbytes", "crc32c", "crc64")}
        return real(self, fqn, msgspec.structs.replace(chunk, **same))

    return known_as


def _needs_no_pack(_real: Any) -> Any:
    return lambda store: set()


def _sees_no_manifest(real: Callable[..., Any]) -> Any:
    return lambda store, folder: (None, real(store, folder)[1])


def _leaves_a_region_out(real: Callable[..., Any]) -> Any:
    def plan(saved: Any, want: Any, *, strict: bool = True) -> Any:
        found = real(saved, want, strict=strict)
        return msgspec.structs.replace(found, copies=found.copies[: max(len(found.copies) - 1, 1)])

    return plan


def _trusts_any_step(_real: Any) -> Any:
    return lambda root: iter(sorted(committed_steps(root)))


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="store", seed=seed)


BUGS: Final = (
    _bug(
        "chunk-unchecked",
        "chunks of a pack are not compared with their checksums",
        "holdfast.ckpt.format.unpack:ChunkReader._expect",
        _checks_no_chunk,
        12,
    ),
    _bug(
        "chunk-stale",
        "a changed chunk is taken from the previous step",
        "holdfast.ckpt.format.pack:PackWriter._known_as",
        _takes_a_chunk_for_unchanged,
        0,
    ),
    _bug(
        "base-removed",
        "old steps are removed with packs that newer steps need",
        "holdfast.ckpt.checkpoints.bases:needed_packs",
        _needs_no_pack,
        0,
    ),
    _bug(
        "late-saver",
        "a save of an older generation replaces a newer generation's checkpoint",
        "holdfast.ckpt.checkpoints.commit:_standing",
        _sees_no_manifest,
        4,
    ),
    _bug(
        "region-missed",
        "resharding omits the last region",
        "holdfast.ckpt.geometry.reshard:plan",
        _leaves_a_region_out,
        1,
    ),
    _bug(
        "oldest-loaded",
        "the oldest checkpoint is loaded instead of the newest",
        "holdfast.ckpt.checkpoints.catalog:verified",
        _trusts_any_step,
        0,
    ),
)
