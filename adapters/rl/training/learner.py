"""The training of one policy in one generation: its model, optimizer and loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn

from holdfast import elastic
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.divergence import KLConfig
from holdfast.adapters.rl.policy.policy import Policy, parameter_names, reshard, shard
from holdfast.adapters.rl.policy.team import prefix_of
from holdfast.adapters.rl.training.proximal import Ewma, Recomputed
from holdfast.adapters.rl.training.recheck import Recheck
from holdfast.adapters.rl.training.reference import ReferencePolicy
from holdfast.adapters.rl.training.survey import Survey, survey
from holdfast.adapters.rl.training.update import Update, make_optimizer
from holdfast.adapters.rl.weights.beginning import load_reference
from holdfast.adapters.rl.weights.pull import weights_of
from holdfast.adapters.rl.weights.setup import PolicyMaker

_RECHECK_LIMIT_S = 2.0


class PolicyLearner:
    """The policy ``name``, number ``speaker`` of the job, by its own settings.

    ``retained`` is the number of versions in every snapshot, as in `pull`.
    """

    def __init__(
        self,
        run: elastic.Run,
        maker: PolicyMaker,
        *,
        config: RLConfig,
        name: str,
        speaker: int,
        retained: int,
    ) -> None:
        self.name, self.speaker = name, speaker
        self._run, self._config, self._maker, self._retained = run, config, maker, retained
        self.model = self._build()
        self.optimizer = make_optimizer(self.model.parameters(), lr=config.lr)
        self.proximal = self._proximal()
        self.reference = self._reference()
        self.recheck = Recheck(
            maker.build,
            lambda version: self._weights(version, limit_s=_RECHECK_LIMIT_S),
            precision=config.rollout_precision,
        )

    def learn(self, batch: TrainingBatch, *, step: int) -> Update:
        """Make the pass of ``step`` over this policy's batch; the gradient is not applied yet."""
        config, run = self._config, self._run
        found = self._survey(batch) if config.loss.surveys else None
        update = Update.of(batch, found, config=config, step=step)
        update.set_rate(self.optimizer)
        for index in run.microbatches():
            run.backward(
                update.loss(self.model, config=config, index=index, of=config.microbatches)
            )
        run.clip_grad_norm_(self.model.parameters(), config.max_norm)
        return update

    def apply(self, *, step: int) -> None:
        """Apply the gradient of the pass."""
        self._run.step(self.optimizer)
        if isinstance(self.proximal, Ewma):
            self.proximal.update()
        if self.reference is not None:
            self.reference.renew(self.model, version=step + 1)

    # -- beginning -------------------------------------------------------------------------------

    def _build(self, *, reference: KLConfig | None = None) -> Policy:
        """Return a sharded policy with the weights that it begins with, or those of a reference."""
        model = self._maker.build()
        if not _restores(self._run):
            if reference is None or reference.checkpoint is None:
                self._maker.begin(model)
            else:
                load_reference(model, reference.checkpoint, step=reference.step)
        shard(model, self._run.mesh)
        return model

    def _proximal(self) -> Ewma | Recomputed | None:
        loss = self._config.loss
        if loss.proximal == "ewma":
            return Ewma(self._build(), self.model, decay=loss.ewma_decay)
        if loss.proximal == "recomputed":
            return Recomputed(self._maker.build(), self._weights)
        return None

    def _reference(self) -> ReferencePolicy | None:
        if (kl := self._config.loss.kl) is None:
            return None
        return ReferencePolicy(self._build(reference=kl), kl)

    def _weights(self, version: int, *, limit_s: float = 10.0) -> Mapping[str, Tensor]:
        """Return this policy's tensors of a version, by its own names."""
        names, prefix = parameter_names(self.model), prefix_of(self.name)
        found = weights_of(
            self._run,
            [f"{prefix}{name}" for name in names],
            version,
            limit_s=limit_s,
            retained=self._retained,
        )
        return {name: found[f"{prefix}{name}"] for name in names}

    def _survey(self, batch: TrainingBatch) -> Survey:
        data = self._run.data_mesh
        try:
            return survey(
                self.model,
                batch,
                microbatches=self._config.microbatches,
                rank=data.get_local_rank(),
                ranks=data.size(),
                sum_=lambda found: dist.all_reduce(found, group=data.get_group()),
                proximal=self.proximal,
                reference=self.reference,
            )
        finally:
            reshard(self.model)


def _restores(run: elastic.Run) -> bool:
    """Say whether the generation starts from a snapshot, so that initial weights do not matter."""
    record = elastic.session_of(run).roster().generation
    return record is not None and record.number == run.generation and record.restore is not None


def make_learners(
    run: elastic.Run, config: RLConfig, makers: Mapping[str, PolicyMaker]
) -> dict[str, PolicyLearner]:
    """Return a learner for each policy that this run trains, by name."""
    return {
        name: PolicyLearner(
            run,
            makers[name],
            config=chosen,
            name=name,
            speaker=[*config.by_policy].index(name),
            retained=config.retained,
        )
        for name, chosen in config.here.items()
    }


def frozen_policies(config: RLConfig, makers: Mapping[str, PolicyMaker]) -> dict[str, nn.Module]:
    """Return the policies that are not trained, by name."""
    return {name: makers[name].build() for name in makers if name in config.frozen}
