"""Events of reinforcement learning: samples, weights, checks. Pure."""

from __future__ import annotations

from holdfast.ckpt.events import Event


class RolloutsAwaited(Event, frozen=True, kw_only=True, tag="rollouts_awaited"):
    """Rank 0 has the samples of a step."""

    step: int
    """The step, as it is numbered when it is complete."""

    seconds: float
    """Seconds that it waited for them."""


class PolicyAwaited(Event, frozen=True, kw_only=True, tag="policy_awaited"):
    """A run that trains one policy of several waits for the run of another."""

    step: int
    """The step that waits, as it is numbered when it is complete."""

    policy: str
    """The policy of the run that is waited for."""

    version: int
    """The version of that policy that is needed."""

    newest: int
    """The newest version that can be read; -1 for none."""


class RolesAsked(Event, frozen=True, kw_only=True, tag="roles_asked"):
    """Rank 0 asks for other numbers of workers, or no longer does."""

    roles: dict[str, int]
    """Number of workers by role; empty if an earlier ask is withdrawn."""

    reason: str
    """Reason, in words."""

    waits: float = 0.0
    """Share of a step for which the trainers waited for samples, from 0 to 1."""

    works: float = 0.0
    """Share of a step for which the rollout workers were at work, from 0 to 1."""

    step_s: float = 0.0
    """Seconds of a step."""

    expected_s: float = 0.0
    """Seconds of a step that are expected with these numbers."""


class StepTail(Event, frozen=True, kw_only=True, tag="rollout_tail"):
    """The figures of a step's samples: their lengths and what the slowest of them cost."""

    step: int
    """The step, as it is numbered when it is complete."""

    length_p50_tokens: float = 0.0
    """Median of the sampled tokens of a sample."""

    length_p95_tokens: float = 0.0
    """95th percentile of the sampled tokens of a sample."""

    length_max_tokens: float = 0.0
    """Most sampled tokens of a sample."""

    waited_p50_s: float = 0.0
    """Median of the seconds that a finished sample waited for the step."""

    waited_p95_s: float = 0.0
    """95th percentile of the seconds that a finished sample waited for the step."""

    waited_max_s: float = 0.0
    """Most seconds that a finished sample waited for the step."""

    busy: float = 0.0
    """Share of the workers' slots that were busy since the step before, from 0 to 1."""

    working: float = 0.0
    """Share of the workers' time in which at least one of their slots was busy, from 0 to 1."""

    carried_tokens: int = 0
    """Tokens that are sampled already and stay for later steps."""

    ordinals: tuple[int, ...] | None = None
    """Ordinals of the prompts that the step trains on; null in modes where they follow from it."""


class EpisodesPlayed(Event, frozen=True, kw_only=True, tag="episodes"):
    """The figures of a step's episodes in an environment."""

    step: int
    """The step, as it is numbered when it is complete."""

    turns_mean: float
    """Mean number of turns."""

    turns_most: int
    """Most turns of an episode."""

    observed_tokens: int
    """Tokens that came from the environment."""

    cut_short: int
    """Number of episodes that the environment did not end."""


class TokensSampled(Event, frozen=True, kw_only=True, tag="sampled"):
    """The totals of a rollout worker since its start; told a few times a second."""

    tokens: int
    """Tokens that it sampled."""

    sampling_s: float
    """Seconds that it spent on sampling."""

    logging_s: float
    """Seconds that it spent on its log."""

    logged_bytes: int = 0
    """Bytes that it wrote to its log."""


class SamplingChanged(Event, frozen=True, kw_only=True, tag="sampling"):
    """A rollout worker begins to have samples under way, or has none any more."""

    samples: int
    """Number of samples under way with tokens in the log, 0 for none."""


class BackPressure(Event, frozen=True, kw_only=True, tag="back_pressure"):
    """Work begins to be held back, or is no longer."""

    because: str
    """The limit that was reached, ``none`` where work is given out freely again: ``budget`` or
    ``memory`` by the trainer, ``worker`` by the worker."""

    held_tokens: int
    """Tokens that are held and not trained on."""


class LedgerCounted(Event, frozen=True, kw_only=True, tag="ledger"):
    """The states of the prompts in the ledger, a few seconds after the last count."""

    pending: int
    """Prompts that wait for a worker."""

    running: int
    """Prompts of which a worker has a sample."""

    ready: int
    """Prompts whose samples are finished, and which no step has taken yet."""

    trained: int
    """Prompts that steps were trained on."""

    dropped: int
    """Prompts that were given up, and wait for their step to pass."""

    skipped: int = 0
    """Prompts that were passed over, as all of their rewards are equal."""

    awaited: int
    """Prompts that the next step waits for."""

    samples: int
    """Samples that were taken, a lower bound after a rollback."""

    duplicates: int
    """Samples that came twice and were refused."""

    held_tokens: int
    """Tokens of samples that are not trained on yet."""

    workers: int
    """Rollout workers that sample for the ledger."""

    staleness_most: int
    """The greatest number of steps between a sample's oldest token and its training."""


class RolloutLeft(Event, frozen=True, kw_only=True, tag="rollout_left"):
    """A rollout worker of a node that leaves handed everything over."""

    worker: str
    """Seat of the worker."""

    samples: int
    """Number of unfinished samples."""

    tokens: int
    """Sampled tokens in the unfinished samples."""

    finished: int
    """Number of finished samples that were not handed in before."""


class RolloutRecovered(Event, frozen=True, kw_only=True, tag="rollout_recovered"):
    """The work of a lost rollout worker was taken back from its log."""

    worker: str
    """Seat of the worker."""

    samples: int
    """Number of samples in the log."""

    unfinished: int
    """Number of samples that go on elsewhere."""

    tokens: int
    """Tokens in the log that the trainer did not have."""

    resampled: int
    """Tokens that are sampled again, since the log has not got them."""


class SampledUnprotected(Event, frozen=True, kw_only=True, tag="sampled_unprotected"):
    """Samples come from weights that are not protected; told once."""

    step: int
    """Policy version of the weights."""

    protected: int
    """Newest protected step, -1 for none."""


class WeightsPulled(Event, frozen=True, kw_only=True, tag="weights_pulled"):
    """A rollout worker has the weights of a policy version."""

    generation: int
    """Generation that the weights were pulled in."""

    version: int
    """Policy version."""

    before: int | None
    """Policy version that it had in this generation before, null for none."""

    seconds: float
    """Seconds that it took."""

    bytes: int
    """Bytes that were read."""

    saved_bytes: int
    """Bytes that did not have to be read, since they did not change."""

    digest: str
    """Digest of the weights."""


class WeightsRefused(Event, frozen=True, kw_only=True, tag="weights_refused"):
    """A rollout worker refused weights that are not those the trainer published."""

    version: int
    """Policy version."""

    count: int
    """Number of refusals of this worker."""

    avoided: tuple[int, ...]
    """Ranks whose blocks the next attempt avoids."""

    why: str
    """Cause, in words."""


class VersionUnavailable(Event, frozen=True, kw_only=True, tag="version_unavailable"):
    """A rollout worker cannot have the weights of a policy version, and asks for other work."""

    version: int
    """Policy version."""

    seconds: float
    """Seconds since this version was first missing."""

    why: str
    """Cause, in words."""


class SampleRechecked(Event, frozen=True, kw_only=True, tag="rechecked"):
    """The trainer computed the log-probabilities of a sample anew."""

    step: int
    """The step, as it is numbered when it is complete."""

    difference: float | None
    """Largest difference to those of the rollout worker; null where it is not finite."""

    seconds: float
    """Seconds that it took."""


class RecheckSkipped(Event, frozen=True, kw_only=True, tag="recheck_skipped"):
    """The trainer could not compute the log-probabilities of a sample anew."""

    step: int
    """The step, as it is numbered when it is complete."""

    why: str
    """Cause, in words."""


class RuleViolated(Event, frozen=True, kw_only=True, tag="violation"):
    """A check of the samples failed."""

    step: int
    """The step, as it is numbered when it is complete."""

    what: str
    """The violation, in words."""


class TrainingHeld(Event, frozen=True, kw_only=True, tag="held"):
    """The trainer stood still on request, as the demo's schedule asks."""

    step: int
    """The step, as it is numbered when it is complete."""

    seconds: float = 0.0
    """Seconds that it stood."""


class EnvironmentWaits(Event, frozen=True, kw_only=True, tag="environment_waits"):
    """Time that a rollout worker's episodes waited for the environment since the last event."""

    calls: int
    """Number of replies."""

    p50_s: float
    """Median of the waiting time, in seconds."""

    p95_s: float
    """95th percentile of the waiting time, in seconds."""

    p99_s: float
    """99th percentile of the waiting time, in seconds."""

    longest_s: float
    """Longest waiting time, in seconds."""

    failed: int
    """Number of attempts that failed or took too long."""

    given_up: int
    """Number of calls whose last attempt failed."""

    waiting: int
    """Number of episodes that wait now."""


class EnvironmentUnprotected(Event, frozen=True, kw_only=True, tag="environment_unprotected"):
    """A rollout worker's environment processes run without a part of their sandbox."""

    lacking: tuple[str, ...]
    """The protection that they lack: ``processes``, ``network``, ``files``."""

    why: str
    """Cause, in words."""


class GroupsBorrowed(Event, frozen=True, kw_only=True, tag="groups_borrowed"):
    """A step trains on groups of samples of other runs, recorded before it began."""

    step: int
    """The step, as it is numbered when it is complete."""

    groups: int
    """Number of groups that it borrowed."""

    wished: int
    """Number of groups that it would borrow at most."""

    origins: tuple[str, ...] = ()
    """Run and ordinal of each group, as ``oslo/17``."""

    failed: str = ""
    """Reason why the pool could not be reached last, empty if it was."""


class GroupsShared(Event, frozen=True, kw_only=True, tag="groups_shared"):
    """Groups of samples of this run are in the pool for others."""

    groups: int
    """Number of groups."""

    bytes: int
    """Bytes that were written for them."""


class GroupLeftOut(Event, frozen=True, kw_only=True, tag="group_left_out"):
    """A group of another run is not one that this run can train on; told once."""

    island: str
    """Name of the run that shares it."""

    ordinal: int
    """Ordinal of its prompt there."""

    why: str
    """Cause, in words."""
