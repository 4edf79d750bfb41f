"""Lightning's Trainer and its loops, as far as they differ here: data, validation, other calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from holdfast.adapters.shared.random_states import GlobalRandomness, seed_all
from holdfast.elastic import ConfigError, Run, session_of
from holdfast.elastic.randomness import stream_seed


class RankTrainer(Trainer):  # type: ignore[misc]
    """The Trainer that hooks and callbacks see; `fit` drives it."""

    @property
    def log_dir(self) -> str:
        """The folder of the first logger."""
        return str(self.loggers[0].log_dir if self.loggers else self.default_root_dir)

    def fit(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a run in the run."""
        self._refuse("fit")

    def validate(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a run in the run."""
        self._refuse("validate")

    def test(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a run in the run."""
        self._refuse("test")

    def predict(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a run in the run."""
        self._refuse("predict")

    def _refuse(self, call: str) -> NoReturn:
        raise ConfigError(
            f"trainer.{call} has no meaning in Holdfast's loop: make a Trainer of Lightning's and "
            "call it after the decorated function has returned"
        )


class FitLoopOfRank(_FitLoop):  # type: ignore[misc]
    """The loop over epochs, of which a batch is a step of all ranks."""

    def __init__(self, trainer: Any, run: Run) -> None:
        theirs = trainer.fit_loop
        super().__init__(trainer, min_epochs=theirs.min_epochs, max_epochs=theirs.max_epochs)
        self._run = run
        self.epoch_loop = theirs.epoch_loop
        self.epoch_loop.val_loop = ValidationOfRank(trainer, run)
        self.loader: Any = None

    def setup_data(self) -> None:
        """Give the training data to the run, once."""
        if self.loader is not None:
            return
        given = self._data_source.dataloader()
        check_loader(given)
        self.loader = self._run.loader(given)
        self._combined_loader = CombinedLoader(given, "max_size_cycle")
        self.max_batches = len(self.loader)
        self._set_interval()

    def _set_interval(self) -> None:
        trainer, batches = self.trainer, self.max_batches
        interval = trainer.val_check_interval
        if not isinstance(interval, int):
            trainer.val_check_batch = max(1, int(batches * interval))
            return
        trainer.val_check_batch = interval
        if interval > batches and trainer.check_val_every_n_epoch is not None:
            raise ConfigError(
                f"fit(val_check_interval={interval}): an epoch has {batches} steps: give fewer, or "
                "check_val_every_n_epoch=None to count steps over epochs"
            )


def check_loader(given: Any) -> None:
    """Raise ``ConfigError`` unless the training data are one DataLoader that can be indexed."""
    if not isinstance(given, DataLoader):
        raise ConfigError(
            f"fit: the training data are a {type(given).__name__}: give one DataLoader (several "
            "data sets at once are a torch.utils.data.StackDataset)"
        )
    if given.drop_last:
        raise ConfigError(
            "fit: DataLoader(drop_last=True) is not supported: leave it out: the last step of an "
            "epoch has the rest of the samples"
        )
    if isinstance(given.dataset, IterableDataset):
        raise ConfigError(
            "fit: an IterableDataset is not supported: give a data set that can be indexed, or "
            "write the loop with run.loader, which takes streams (docs/how-to/data.md)"
        )


class ValidationOfRank(_EvaluationLoop):  # type: ignore[misc]
    """The validation, whole on every rank, under a seed that follows from the step."""

    def __init__(self, trainer: Any, run: Run) -> None:
        super().__init__(
            trainer,
            TrainerFn.FITTING,
            RunningStage.VALIDATING,
            verbose=False,
            inference_mode=False,
        )
        self._run = run

    def run(self) -> Any:
        """Validate; long work is no hang."""
        with self._run.pause(), apart_randomness(self._run, "validation"):
            return super().run()


@contextmanager
def apart_randomness(run: Run, what: str) -> Iterator[None]:
    """Let the body draw numbers of its own, alike on every rank, and go on as if it had not."""
    before = GlobalRandomness.taken(run.device)
    seed_all(stream_seed(session_of(run).seed, what, run.completed))
    try:
        yield
    finally:
        before.put_back(run.device)
