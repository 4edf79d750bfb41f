"""A Trainer in one generation: its place among the ranks, its data, and its steps."""

from __future__ import annotations

import copy
import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.adapters.hf.grpo import MicrobatchesOfGrpo
from holdfast.adapters.hf.kept import FirstState, KeptTrainer
from holdfast.adapters.hf.microbatches import MicrobatchesOfTrainer
from holdfast.adapters.hf.ranks import stand_at
from holdfast.adapters.hf.sharded import cut, share_first
from holdfast.adapters.hf.shards import ShardedModel
from holdfast.ckpt import Rebuilt
from holdfast.elastic import ConfigError, Run, session_of

_log = logging.getLogger(__name__)

_ENTRY: Final = "trainer"


@dataclass(slots=True)
class Journey:
    """The facts that a call of `train` carries from one generation to the next.

    ``samples`` is the number of samples of the whole training, for the summary. ``shards`` are
    those of the model, if it is cut.
    """

    resume_from: str | None = None
    first: FirstState | None = None
    took_part: bool = False
    samples: float = 0.0
    shards: ShardedModel | None = None

    def release(self, *, trained: bool = False) -> None:
        """Make a model that was cut whole again, with the ``trained`` weights or the first ones."""
        if self.shards is not None:
            self.shards.release(trained=trained)
            self.shards = None


class GenerationOfTrainer:
    """The training of one generation, on the model that the Trainer has."""

    def __init__(
        self, trainer: Any, run: Run, journey: Journey, ignore_keys: list[str] | None
    ) -> None:
        self.run = run
        self._trainer, self._journey, self._ignore_keys = trainer, journey, ignore_keys
        self._kept: KeptTrainer | None = None
        self._work: MicrobatchesOfTrainer | None = None
        self._in_loop, self._began, self._batches = False, 0, 0
        self._backward = trainer.accelerator.backward

    def train(self) -> dict[str, Any]:
        """Train until the end; return plain values that are equal on all ranks."""
        trainer, run, journey = self._trainer, self.run, self._journey
        stand_at(trainer, run.rank)
        journey.release()
        again, journey.took_part = journey.took_part, True
        if again and journey.first is not None:
            journey.first.put_back()
        self._warn_of_idle_ranks()
        work = self._work = self._made_work()
        steps, total = len(work.loader), self._planned(len(work.loader))
        self._begin_state(steps, total)
        if trainer.args.fsdp:
            journey.shards = cut(trainer, run)
            if journey.first is not None and journey.first.is_dropped:
                self._drop_whole()
        self._track(work, again=again)
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        run.on_protected(self._hand_on)
        start, begun, self._began = time.time(), True, run.completed
        self._in_loop = True
        with work.serving():
            for step in run.steps(total):
                if begun or step % steps == 0:
                    self._call("on_epoch_begin")
                self._step(work, step, steps=steps, total=total, start=start)
                begun = False
                self._drop_first(step)
        self._in_loop = False
        made = max(run.completed - trainer._initial_global_step, 1)
        loss = (trainer._total_loss_scalar + float(trainer._tr_loss)) / made
        if journey.shards is not None:
            journey.shards.collect()
        return {"global_step": run.completed, "train_loss": loss}

    def leave(self) -> None:
        """Give the Trainer its own backward again."""
        self._in_loop = False
        self._trainer.accelerator.backward = self._backward

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which no forward communicates, on all ranks; collective."""
        shards = self._journey.shards
        return nullcontext() if shards is None else shards.gathered()

    def lifted(self) -> AbstractContextManager[None]:
        """Return a context in which rank 0 has model and optimizer whole; collective."""
        shards = self._journey.shards
        if shards is None or shards.is_lifted:
            return nullcontext()
        return shards.lifted(here=self.run.is_leader)

    def keeps(self, logs: dict[str, Any]) -> bool:
        """Keep the logs of the present step for later; return whether there is one."""
        if not self._in_loop or self._kept is None:
            return False
        if self.run.is_leader:
            self._kept.waiting.append((self.run.completed, dict(logs)))
        return True

    def save_beside(self, folder: Path) -> None:
        """Write into a ``checkpoint-N`` what a run needs that goes on from it."""
        if self._work is not None and not self._trainer.args.save_only_model:
            self._work.save(folder)

    def _made_work(self) -> MicrobatchesOfTrainer:
        trainer, run, made = self._trainer, self.run, self._made_loader()
        if trainer.holdfast_rounds is not None:
            rounds = trainer.holdfast_rounds
            return MicrobatchesOfGrpo(trainer, run, made, rounds, planned=self._planned)
        made.worker_init_fn = None  # it seeds by rank; samples have seeds of their own
        return MicrobatchesOfTrainer(trainer, run, run.loader(made))

    def _made_loader(self) -> Any:
        trainer = self._trainer
        prepare, trainer.accelerator.prepare = trainer.accelerator.prepare, lambda each: each
        try:
            made = trainer.get_train_dataloader()
        finally:
            trainer.accelerator.prepare = prepare
        if isinstance(made.dataset, torch.utils.data.IterableDataset):
            raise ConfigError(
                "resilient_trainer: an iterable train_dataset is not supported yet: give a data "
                "set that can be indexed, or write the loop with run.loader, which takes streams"
            )
        self._batches = len(made)
        return made

    def _planned(self, steps_of_epoch: int) -> int:
        args = self._trainer.args
        if args.max_steps > 0:
            total: int = args.max_steps
        else:
            total = math.ceil(args.num_train_epochs * steps_of_epoch)
        return total

    def _begin_state(self, steps: int, total: int) -> None:
        """Make optimizer, scheduler and TrainerState as the Trainer's own loop does."""
        trainer, resume = self._trainer, self._journey.resume_from
        epochs = math.ceil(total / steps)
        self._journey.samples = (
            total * self._microbatches() * trainer.args.per_device_train_batch_size
        )
        trainer._init_training_state(total, steps, epochs, resume, None)
        stand_at(trainer, self.run.rank)
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        trainer.create_optimizer_and_scheduler(total)
        if resume is not None:
            trainer._load_optimizer_and_scheduler(resume)
        if all(each is not trainer.model for each in trainer.accelerator._models):
            # It wraps the forward in autocast, once.
            trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        trainer._tr_loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = trainer._initial_global_step = trainer.state.global_step
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer.current_gradient_accumulation_steps = 1

    def _microbatches(self) -> int:
        args, settings = self._trainer.args, self._trainer.holdfast
        count: int = settings.microbatches or args.gradient_accumulation_steps
        return count

    def _warn_of_idle_ranks(self) -> None:
        count, ranks = self._microbatches(), self.run.world_size
        if count < ranks and self.run.is_leader:
            _log.warning(
                "a step has %d microbatches for %d ranks, so %d do nothing useful: set "
                "gradient_accumulation_steps=%d or more",
                count,
                ranks,
                ranks - count,
                ranks,
            )

    def _track(self, work: MicrobatchesOfTrainer, *, again: bool) -> None:
        """Track the state, and restore it if there is a restore point."""
        trainer, run, journey = self._trainer, self.run, self._journey
        kept = self._kept = KeptTrainer(trainer)
        session_of(run).count_on_leader(_ENTRY)
        model = trainer.model
        if trainer.holdfast.rebuild_frozen:
            model = Rebuilt(model)
        parts = {"model": model, "optimizer": trainer.optimizer}
        run.track(**parts, scheduler=trainer.lr_scheduler, **{_ENTRY: kept}, **work.tracked())
        if run.completed or journey.first is None:
            return
        if again and journey.first.is_dropped:
            raise ConfigError(
                "resilient_trainer: no snapshot of the run is left, and its first weights are gone "
                "from memory: start the script again, or give HoldfastArguments(checkpoint=...), "
                "from which the run goes on"
            )
        self._share_first()
        if journey.resume_from is not None:
            session_of(run).begin_at(trainer.state.global_step, work.loader)
            work.resume(journey.resume_from)

    def _share_first(self) -> None:
        """Give all ranks the first weights of rank 0, which each rank made by itself."""
        if self._journey.shards is not None:
            share_first(self._journey.shards, self.run)
            return
        with torch.no_grad():
            for parameter in self._trainer.model.parameters():
                if parameter.requires_grad and self.run.world_size > 1:
                    dist.broadcast(parameter.detach(), src=0)

    def _drop_first(self, step: int) -> None:
        first = self._journey.first
        if first is not None and not first.is_dropped and self.run.protection.step > self._began:
            first.drop_tensors()
            self._drop_whole()

    def _drop_whole(self) -> None:
        """Free the whole weights of a model that is cut, but for those that are built once."""
        if self._journey.shards is not None:
            self._journey.shards.drop(keep_frozen=self._trainer.holdfast.rebuild_frozen)

    def _call(self, event: str) -> None:
        trainer = self._trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state, trainer.control)

    def _step(
        self, work: MicrobatchesOfTrainer, step: int, *, steps: int, total: int, start: float
    ) -> None:
        trainer, run, args = self._trainer, self.run, self._trainer.args
        self._call("on_step_begin")
        loss = work.run_pass()
        limit = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else math.inf
        norm = run.clip_grad_norm_(trainer.model.parameters(), limit)
        self._call("on_pre_optimizer_step")
        run.step(trainer.optimizer)
        self._call("on_optimizer_step")
        rate = trainer._get_learning_rate()
        trainer.lr_scheduler.step()
        trainer.state.global_step = step + 1
        trainer.state.epoch = self._epochs(step + 1, steps=steps)
        self._add_loss(loss)
        self._call("on_step_end")
        self._refuse_skipping()

        def report() -> None:
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss,
                norm,
                trainer.model,
                None,
                trainer.state.epoch,
                self._ignore_keys,
                start,
                learning_rate=rate,
            )

        report()
        if (step + 1) % steps == 0 or step + 1 == total or trainer.control.should_training_stop:
            self._call("on_epoch_end")
            report()
        if trainer.control.should_training_stop and step + 1 < total:
            run.stop()
        if self._kept is not None:
            self._kept.collect()

    def _epochs(self, count: int, *, steps: int) -> float:
        """Return the epochs of the first ``count`` steps; the last step of one may be smaller."""
        whole, rest = divmod(count, steps)
        return whole + rest * self._microbatches() / self._batches

    def _add_loss(self, loss: float) -> None:
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
            since = 1 + trainer.state.global_step - 1 - trainer._globalstep_last_logged
            trainer._tr_loss += trainer._tr_loss / max(since, 1)
        else:
            trainer._tr_loss += loss

    def _refuse_skipping(self) -> None:
        if self._trainer.control.should_epoch_stop:
            raise ConfigError(
                "resilient_trainer: a callback set control.should_epoch_stop, which is not "
                "supported yet: set control.should_training_stop, or give fewer samples"
            )

    def _hand_on(self, step: int, _: dict[str, float]) -> None:
        """Give the callbacks the logs of a step that is protected; rank 0 only."""
        trainer, kept = self._trainer, self._kept
        if kept is None:
            return
        due = [logs for number, logs in kept.waiting if number == step]
        # Those of earlier steps, which a restore may bring back, were handed on already.
        kept.waiting = [each for each in kept.waiting if each[0] > step]
        for logs in due:
            state, control = copy.copy(trainer.state), copy.copy(trainer.control)
            state.global_step, state.epoch = step + 1, logs.get("epoch", trainer.state.epoch)
            trainer._hands_on_logs(trainer.args, state, control, dict(logs))
