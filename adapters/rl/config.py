"""The settings of an RL job: one frozen value, read once from a JSON file."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from holdfast.adapters.rl.balance.choosing import JobShape
from holdfast.adapters.rl.balance.settings import BalanceConfig
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.checker import CheckConfig
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.loss.penalties import LengthPenalty
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.policy.joining import check_join
from holdfast.adapters.rl.policy.lora import LoraConfig
from holdfast.adapters.rl.policy.model import ModelConfig
from holdfast.adapters.rl.policy.rounding import Precision
from holdfast.adapters.rl.policy.settings import PolicyConfig, StartWeights, check_policies
from holdfast.adapters.rl.samples.tokens import Ascii, Tokenizer
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.adapters.rl.sharing.settings import Share, ShareConfig, fits
from holdfast.elastic.errors import ConfigError

ROLE = "rollout"
"""The role of rollout workers, the first part of their seats."""


class WarmStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps before the reinforcement: ``steps`` of ``rows`` examples each."""

    steps: int = 80
    rows: int = 64
    lr: float = 1e-3

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}, needed: 0 or more")
        if self.rows < 1:
            raise ValueError(f"rows is {self.rows}, needed: at least 1")


class RLConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An asynchronous RL job in a `Mode`; ``eta`` is the largest staleness, in steps.

    A step trains on ``groups`` prompts with ``group`` samples each, in ``microbatches`` equal
    parts. ``pretrained`` is the directory of a causal language model of Hugging Face's transformers
    and its tokenizer, to be trained instead of the built-in small model; of ``model`` only the
    context counts then. With ``lora`` only adapters are trained. ``tp`` ranks share the heads and
    hidden units of a layer.

    ``warm_start`` is the directory of the warmed-up model: read if it has one, written by
    ``python -m holdfast.rl --warm-up``; None starts from the model as it is. ``exact_weight`` is
    the weight of the exact match in the reward; the rest is the task's shaped score.
    ``environment`` gives prompts and rewards instead of the task, for episodes of several turns of
    ``max_new_tokens`` each; the warm-up still learns the task's answers. ``length`` are penalties
    that are subtracted from the reward of long answers. ``classifiers`` are the directories of
    models that score texts for the environment, by name.

    With ``share`` finished groups go to other jobs, and some of theirs are trained on.

    With the directory ``join`` each policy that is trained has a run of its own, which trains
    ``policy``; the run of the first one, the lead, samples for all.

    ``slots`` and ``log_every_ticks`` apply to each rollout worker, which samples with weights of
    ``rollout_precision``. Without ``log_rollouts`` the
    unfinished samples of a lost worker are sampled again. ``checkpoint`` is the directory, or
    an address such as ``s3://bucket/prefix``, that every ``checkpoint_every`` steps and the last
    one are written to, and from which the same command resumes after everything was killed.
    ``disk`` is the directory on every node's own disk that snapshots are spilled to, for the same
    purpose (``holdfast run --disk``). No step begins while the file ``hold`` exists (None: no such
    file). ``check`` are the settings of the always-on checker. With ``balance`` workers move
    between training and sampling as one waits for the other.
    """

    task: str = "spell_backward"
    task_seed: int = 7
    exact_weight: float = 1.0
    seed: int = 0
    model: ModelConfig = ModelConfig()
    pretrained: str | None = None
    lora: LoraConfig | None = None
    loss: LossConfig = LossConfig()
    length: LengthPenalty = LengthPenalty()
    check: CheckConfig = CheckConfig()
    warm: WarmStart = WarmStart()
    warm_start: str | None = None
    start: StartWeights | None = None
    policies: dict[str, PolicyConfig] = {}
    classifiers: dict[str, str] = {}
    join: str | None = None
    policy: str = ""
    environment: EnvironmentConfig | None = None
    steps: int = 100
    groups: int = 8
    group: int = 8
    microbatches: int = 8
    mode: Mode = Mode.FIXED_LAG
    eta: int = 2
    scheduling: Scheduling = Scheduling()
    replay: ReplayConfig = ReplayConfig()
    share: ShareConfig | None = None
    max_new_tokens: int = 8
    lr: float = 1e-3
    lr_warmup_steps: int = 5
    max_norm: float = 1.0
    slots: int = 32
    log_every_ticks: int = 4
    log_rollouts: bool = True
    rollout_precision: Precision = "full"
    held_out: int = 256
    evaluate_every: int = 10
    parity: int = 1
    min_dp: int = 1
    tp: int = 1
    checkpoint: str | None = None
    checkpoint_every: int = 100
    disk: str | None = None
    hold: str | None = None
    balance: BalanceConfig | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "groups", "group", "microbatches", "max_new_tokens", "slots", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, needed: at least 1")
        if self.group < 2:
            raise ValueError(f"group is {self.group}: an advantage needs at least 2 samples")
        if self.groups * self.group % self.microbatches:
            raise ValueError(
                f"{self.groups} groups x {self.group} samples cannot be divided into "
                f"{self.microbatches} equal microbatches"
            )
        if self.eta < 0:
            raise ValueError(f"eta is {self.eta}, needed: 0 or more")
        self.scheduling.check(mode=self.mode.value, eta=self.staleness)
        if not 0 <= self.exact_weight <= 1:
            raise ValueError(f"exact_weight is {self.exact_weight}, needed: 0 to 1")
        for name in ("log_every_ticks", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, needed: at least 1")
        self._check_penalties()
        self._check_precision()
        if self.tp > 1:
            self._check_tp()
        if self.share is not None:
            self._check_share(self.share)
        if self.start is not None and self.warm_start is not None:
            raise ValueError(
                "start and warm_start both name weights to begin with: set one to null"
            )
        plays = self.environment is not None
        check_policies(self.policies, classifiers=self.classifiers, plays=plays)
        if self.policies:
            self._check_policies()
        self._check_join()

    def _check_policies(self) -> None:
        if self.share is not None:
            raise ValueError("share: samples of several policies are not shared; set it to null")
        if self.start is not None:
            raise ValueError("start: give it to one of the policies")
        if self.length != LengthPenalty():
            raise ValueError(
                "length: an episode of several policies has tokens of each; leave it out, and let "
                "the environment's rewards heed lengths"
            )
        if self.scheduling.skip_equal is not None:
            raise ValueError(
                "scheduling.skip_equal: a group whose rewards are all equal for one policy may "
                "teach another; set it to null"
            )
        for name, each in self.by_policy.items():  # checks the settings of each
            if (each.model.context, each.model.vocabulary) != (
                self.model.context,
                self.model.vocabulary,
            ):
                raise ValueError(
                    f"policies: {name} has a context of {each.model.context} and a vocabulary of "
                    f"{each.model.vocabulary}, the job {self.model.context} and "
                    f"{self.model.vocabulary}: all policies read one text; give them the same"
                )
            if (each.pretrained is None) != (self.pretrained is None):
                raise ValueError(
                    f"policies: {name} is a model of transformers and others are built in: all "
                    "policies read the same tokens; set pretrained for the job"
                )

    def _check_join(self) -> None:
        if self.join is not None:
            excluded = {
                "mode 'bounded'": self.mode is Mode.BOUNDED,
                "replay": self.replay.policy != "none",
                "disk": self.disk is not None,
                "balance": self.balance is not None,
            }
            check_join(self.join, self.trained, policy=self.policy, excluded=excluded)
        elif self.policy:
            raise ValueError(
                f"policy is {self.policy!r} without join: set join to a directory for runs that "
                "train one policy each"
            )
        for name, chosen in self.policies.items():
            if self.join is None and (chosen.tp is not None or chosen.min_dp is not None):
                raise ValueError(
                    f"policies: {name} has a tp or a min_dp of its own: without join all policies "
                    "have the same ranks; give tp and min_dp to the job, or set join"
                )

    def _check_precision(self) -> None:
        if self.rollout_precision != "full" and self.lora is not None:
            raise ValueError(
                f"rollout_precision is {self.rollout_precision!r}: Holdfast does not round models "
                "with LoRA adapters; set it to 'full' or lora to null"
            )

    def _check_penalties(self) -> None:
        overlong, kl = self.length.overlong_tokens, self.loss.kl
        if overlong > self.max_new_tokens:
            raise ValueError(
                f"length.overlong_tokens is {overlong}, needed: at most the {self.max_new_tokens} "
                "of max_new_tokens"
            )
        if overlong and self.environment is not None:
            raise ValueError(
                "length.overlong_tokens: an episode has no longest length; set it to 0, and give "
                "length.per_token instead"
            )
        if kl is not None and kl.checkpoint is not None and self.lora is not None:
            raise ValueError(
                "loss.kl.checkpoint: with lora the reference is the frozen model, which is version "
                "0; set checkpoint to null"
            )

    def _check_share(self, share: ShareConfig) -> None:
        if remedy := fits(share, self.groups):
            raise ValueError(f"share: {remedy}")
        if self.environment is not None:
            raise ValueError(
                "share: the reward of an episode is its environment's, and cannot be computed by "
                "the job that borrows it; set environment or share to null"
            )
        if self.loss.proximal == "recomputed":
            raise ValueError(
                "share: the weights that sampled a borrowed answer are not here; set loss.proximal "
                "to current or ewma"
            )
        if self.pretrained is not None and not share.family:
            raise ValueError(
                "share: name the tokenizer and the family of the pretrained model in share.family"
            )

    def _check_tp(self) -> None:
        if self.pretrained is not None:
            raise ValueError(
                f"tp is {self.tp}: Holdfast does not split a pretrained model; set tp to 1"
            )
        if self.lora is not None:
            raise ValueError(
                f"tp is {self.tp}: Holdfast does not split LoRA adapters; set tp to 1 or lora to "
                "null"
            )
        if self.model.heads % self.tp:
            raise ValueError(f"tp is {self.tp}, needed: a divisor of {self.model.heads} heads")

    @property
    def by_policy(self) -> dict[str, RLConfig]:
        """The job as it would be with each of its policies alone, by name.

        A job without ``policies`` has one, without a name: the job itself. A policy of the job's
        own model has its warm start too. Each is built from a seed of its own.
        """
        if not self.policies:
            return {"": self}
        return {
            name: self._alone(chosen, seed=self.seed + index)
            for index, (name, chosen) in enumerate(self.policies.items())
        }

    def _alone(self, chosen: PolicyConfig, *, seed: int) -> RLConfig:
        fields = ("model", "pretrained", "loss", "lr", "max_norm", "tp", "min_dp")
        own = {each: getattr(chosen, each) for each in fields if getattr(chosen, each) is not None}
        same = own.keys().isdisjoint(("model", "pretrained")) and chosen.start is None
        return msgspec.structs.replace(
            self,
            **own,
            policies={},
            join=None,
            policy="",
            seed=seed,
            start=chosen.start,
            lora=chosen.lora or (None if chosen.frozen else self.lora),
            warm_start=chosen.warm_start or (self.warm_start if same else None),
        )

    @property
    def frozen(self) -> frozenset[str]:
        """The names of the policies that are not trained."""
        return frozenset(name for name, chosen in self.policies.items() if chosen.frozen)

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the policies that are trained, by this run or by others."""
        return tuple(name for name in self.by_policy if name not in self.frozen)

    @property
    def elsewhere(self) -> frozenset[str]:
        """The names of the policies that other runs train."""
        return frozenset(self.trained) - {self.policy} if self.join is not None else frozenset()

    @property
    def here(self) -> dict[str, RLConfig]:
        """Those of ``by_policy`` that this run trains."""
        away = self.frozen | self.elsewhere
        return {name: each for name, each in self.by_policy.items() if name not in away}

    @property
    def lead(self) -> str:
        """The name of the policy whose run samples, if each policy has a run of its own."""
        return self.trained[0]

    @property
    def leads(self) -> bool:
        """True if this run samples."""
        return self.join is None or self.policy == self.lead

    @property
    def root(self) -> str | None:
        """The directory or address of this run's own checkpoints, None without them."""
        if self.checkpoint is None or self.join is None:
            return self.checkpoint
        return f"{self.checkpoint.rstrip('/')}/{self.policy}"

    @property
    def plan(self) -> BatchPlan:
        """The shape of the job, as the ledger needs it: without groups of other jobs."""
        return BatchPlan(
            groups=self.groups if self.share is None else self.share.own,
            group=self.group,
            eta=self.staleness,
            steps=self.steps,
            limits=self.limits,
            mode=self.mode,
            scheduling=self.scheduling,
            replay=self.replay,
        )

    @property
    def shape(self) -> JobShape:
        """The bounds of the numbers of workers that train and sample."""
        return JobShape(
            unit=self.tp,
            least_groups=self.min_dp,
            microbatches=self.microbatches,
            overlaps=self.staleness > 0,
        )

    @property
    def sharing(self) -> Share | None:
        """The part in a pool of samples, None without one."""
        if (chosen := self.share) is None:
            return None
        model = self.model
        built_in = f"ascii, transformer of {model.layers} x {model.width}, {model.heads} heads"
        return Share(
            meet=chosen.meet,
            name=chosen.name,
            own=chosen.own,
            others=chosen.others,
            keep=chosen.keep,
            family=chosen.family or built_in,
            tokenizer=self.tokenizer,
        )

    @property
    def staleness(self) -> int:
        """The largest staleness of a token: ``eta``, or 0 in mode ``sync``."""
        return 0 if self.mode is Mode.SYNC else self.eta

    @property
    def described(self) -> str:
        """The mode as readable text, such as ``bounded(2)``."""
        return self.mode.value if self.mode is Mode.SYNC else f"{self.mode.value}({self.eta})"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the task's texts."""
        return Ascii() if self.pretrained is None else _pretrained_tokenizer(self.pretrained)

    @property
    def limits(self) -> TurnLimits:
        """The limits of a turn."""
        return TurnLimits(
            end=self.tokenizer.end,
            context=self.model.context,
            max_new_tokens=self.max_new_tokens,
            turns=self.environment is not None,
        )

    @property
    def rows(self) -> int:
        """Number of samples in a batch."""
        return self.groups * self.group

    @property
    def keep(self) -> int:
        """Number of snapshots to keep in memory: all versions that may still be asked to sample.

        If log-probabilities are recomputed under the versions that sampled, those of reused groups
        are kept too.
        """
        return max(2, self._lag + 1)

    @property
    def retained(self) -> int:
        """Number of earlier versions in every snapshot, so that a single snapshot can be resumed.

        0 if no snapshot outlives the job, in a checkpoint or on the nodes' disks, and 0 if samples
        may continue under any newer version.
        """
        again = self.plan.pinned or self._recomputes
        outlives = self.checkpoint is not None or self.disk is not None
        return self._lag if outlives and again else 0

    @property
    def _recomputes(self) -> bool:
        trained = [each for name, each in self.by_policy.items() if name not in self.frozen]
        return any(each.loss.proximal == "recomputed" for each in trained)

    @property
    def _lag(self) -> int:
        """The number of steps by which a version may be older and still be asked for."""
        again = self.replay.policy != "none" and self._recomputes
        return self.staleness + (self.replay.max_age if again else 0)


@functools.cache
def _pretrained_tokenizer(directory: str) -> Tokenizer:
    from holdfast.adapters.rl.policy.pretrained import PretrainedTokenizer

    return PretrainedTokenizer(directory)


def load_config(path: Path) -> RLConfig:
    """Read a JSON file. Raises ``ConfigError`` naming file and field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RLConfig)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}; see RLConfig for its fields") from error


def save_config(config: RLConfig, path: Path) -> None:
    """Write ``config`` as a JSON file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def preset(name: str) -> RLConfig:
    """Return a named configuration. Raises ``ConfigError`` for an unknown name."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"preset {name!r} is not known; choose one of {[*PRESETS]}") from None


PRESETS: dict[str, RLConfig] = {
    "quick": RLConfig(steps=80, microbatches=4, evaluate_every=20),
    "reversal": RLConfig(
        task="reverse",
        model=ModelConfig(width=64, layers=1),
        warm=WarmStart(steps=100, lr=3e-3),
        steps=80,
        groups=16,
        microbatches=4,
        slots=64,
        evaluate_every=10,
    ),
    "full": RLConfig(steps=300, groups=16, lr=5e-4, evaluate_every=25),
    "spiral": RLConfig(
        task="spiral_matrix",
        model=ModelConfig(context=32),
        warm=WarmStart(steps=75),
        max_new_tokens=18,
        steps=60,
        microbatches=4,
        slots=64,
        lr=6e-4,
        max_norm=0.5,
        evaluate_every=10,
    ),
    "tiny": RLConfig(
        task="reverse",
        model=ModelConfig(width=64, layers=1),
        warm=WarmStart(steps=40, rows=32, lr=3e-3),
        exact_weight=0.5,
        steps=6,
        groups=4,
        group=4,
        microbatches=4,
        slots=8,
        held_out=16,
        evaluate_every=3,
    ),
}
"""Settings by name.

``quick`` and ``full`` are for the demo, ``reversal`` and ``spiral`` learn one task in a minute or
two, ``tiny`` is for tests.
"""
