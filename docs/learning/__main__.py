"""The commands that run, compare and draw the learning curves of the documents.

``PYTHONPATH=docs python -m learning curves`` (also ``kills``, ``bounded``, ``study``) writes
pictures and numbers to ``docs/learning``; so does ``precision``, and ``pairs`` repeats the
comparison on the output of ``bounded``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import msgspec
from rich.console import Console

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset, save_config
from holdfast.adapters.rl.environments.task import Task, make_task
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.policy.model import ModelConfig
from holdfast.adapters.rl.policy.rounding import Precision
from holdfast.adapters.rl.weights import warm_up
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import FaultInjected, StepDone, of_kind
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.demo.job import DemoJobRecord, run_job
from holdfast.tools.demo.schedule import Kill
from holdfast.tools.report.timeline import KILL_NODE, KILL_ROLLOUT, KILL_TRAINER
from learning.charts import Points, mean_line, paired_interval, paired_p_value, picture
from learning.lagged import LaggedRun

Outcome = dict[str, Json]

_MAIN: Final = (sys.executable, "-m", "holdfast.rl")
_WANTED: Final = {TRAINER: 2, "rollout": 2}
_KILLS: Final = (KILL_ROLLOUT, KILL_TRAINER, KILL_ROLLOUT, KILL_TRAINER, KILL_NODE)
_SEEDS: Final = 6
_CONFIDENCE: Final = 0.9
"""Confidence of the interval of a difference.

An interval inside a margin is a test of equivalence at 5 % (two one-sided tests).
"""


STUDY: Final = RLConfig(
    task="reverse",
    model=ModelConfig(width=64, layers=1),
    warm=WarmStart(steps=100, rows=64, lr=3e-3),
    exact_weight=0.5,
    steps=60,
    microbatches=2,
    eta=4,
    lr=2e-3,
    slots=64,
    held_out=256,
    evaluate_every=10,
)
"""The job of the study, with a lag of four steps and a learning rate at which the lag shows."""

STABLE: Final = msgspec.structs.replace(STUDY, mode=Mode.BOUNDED, eta=2, lr=1e-3, exact_weight=1.0)
"""The job that is killed in `bounded`, at a learning rate at which all seeds end alike."""

BASE: Final = "current, token, mean"
VARIANTS: Final = {
    BASE: LossConfig(),
    "proximal ewma": LossConfig(proximal="ewma"),
    "proximal recomputed": LossConfig(proximal="recomputed"),
    "correction prefix": LossConfig(correction="prefix"),
    "correction sequence": LossConfig(correction="sequence"),
    "baseline median": LossConfig(baseline="median"),
    "baseline minimum_variance": LossConfig(baseline="minimum_variance"),
}
"""The variants of the study: the default, and each setting changed on its own."""

_ICEPOP: Final = LossConfig(correction="icepop", proximal="recomputed")
PRECISIONS: Final[dict[str, tuple[Precision, LossConfig]]] = {
    "full": ("full", LossConfig()),
    "int8, none": ("int8", LossConfig(correction="none")),
    "int8, token": ("int8", LossConfig()),
    "int8, icepop": ("int8", _ICEPOP),
    "int4, none": ("int4", LossConfig(correction="none")),
    "int4, token": ("int4", LossConfig()),
    "int4, icepop": ("int4", _ICEPOP),
}
"""The weights that sample, and the loss that corrects for them."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A job's held-out exact match over steps, and the processor time of the whole job."""

    name: str
    seed: int
    held_out: list[tuple[int, float]]
    final_hash: str | None = None
    cpu_s: float | None = None

    @property
    def end(self) -> float:
        """The last value of the curve."""
        return self.held_out[-1][1]

    @property
    def mean(self) -> float:
        """The mean of all values, which shows how early and how far the curve rises."""
        return fmean(value for _, value in self.held_out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description="Make the learning curves of the documents.")
    parser.add_argument("which", choices=[*_COMMANDS])
    parser.add_argument("--out", type=Path, default=Path("docs/learning"), metavar="DIR")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many seeds (bounded, study)")
    parser.add_argument("--kills", type=int, default=22, metavar="N", help="in a hurt job (22)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-learning-") as place:
            _COMMANDS[options.which](options, Path(place))
    except (ConfigError, JobFailedError) as error:
        sys.stderr.write(f"learning: {error}\n")
        return 1
    return 0


def _curves(options: argparse.Namespace, place: Path) -> None:
    """Train each task family in one process from nothing, warm-up included."""
    found = [_alone(name, preset(name), place / name) for name in ("reversal", "spiral")]
    for curve in found:
        title = f"{curve.name}: held-out exact match ({preset(curve.name).task})"
        _draw(options.out / f"{curve.name}.svg", {curve.name: curve.held_out}, title)
        print(f"{curve.name}: {curve.held_out[0][1]:.3f} to {curve.end:.3f}, {curve.cpu_s:.0f} s")
    _write(options.out / "curves.json", found)


def _kills(options: argparse.Namespace, place: Path) -> None:
    """Train the preset reversal undisturbed and under kills; the curves must be equal.

    The weights must be equal too, bit for bit.
    """
    config = _warmed(preset("reversal"), place / "warm")
    calm = _alone("undisturbed", config, place / "calm")
    record = _job("hurt", config, place / "hurt", kills=options.kills)
    hurt = _curve("hurt", config, record.result)
    steps = _fault_steps(record)
    title = f"{len(steps)} kills in fixed_lag: the same curve, the same weights"
    lines = {"undisturbed, one process": calm.held_out, "hurt": hurt.held_out}
    _draw(options.out / "kills.svg", lines, title, faults=steps)
    outcome: Outcome = {
        "same": hurt.held_out == calm.held_out and hurt.final_hash == calm.final_hash
    }
    outcome |= {"kills": _told_kills(record), "curves": msgspec.to_builtins([calm, hurt])}
    print(f"kills {outcome['kills']}, same curve and weights: {outcome['same']}")
    _write(options.out / "kills.json", outcome)
    if not outcome["same"]:
        raise JobFailedError("the hurt job's curve or weights are not the undisturbed one's")


def _bounded(options: argparse.Namespace, place: Path) -> None:
    """Compare undisturbed and killed jobs in bounded mode, where equality is a matter of chance.

    The jobs run in pairs, seed by seed. `paired_p_value` compares their last values and the means
    of their curves; `paired_interval` bounds the difference that kills make.
    """
    pairs: list[tuple[Curve, Curve]] = []
    outcome: Outcome = {"kills": []}
    for seed in range(options.seeds or _SEEDS):
        config = msgspec.structs.replace(STABLE, seed=seed)
        config = _warmed(config, place / f"warm-{seed}")
        calm = _job("undisturbed", config, place / f"calm-{seed}")
        hurt = _job("hurt", config, place / f"hurt-{seed}", kills=options.kills, seed=seed)
        outcome["kills"].append(_told_kills(hurt))
        pairs.append(
            (_curve("undisturbed", config, calm.result), _curve("hurt", config, hurt.result))
        )
        print(f"seed {seed}: {[c.end for c in pairs[-1]]}, {outcome['kills'][-1]}", flush=True)
        _tell_pairs(options, pairs, outcome)


def _pairs(options: argparse.Namespace, _: Path) -> None:
    """Repeat the comparison of the pairs that `bounded` has run."""
    outcome = msgspec.json.decode((options.out / "bounded.json").read_bytes(), type=Outcome)
    _tell_pairs(options, msgspec.convert(outcome["curves"], list[tuple[Curve, Curve]]), outcome)


def _tell_pairs(
    options: argparse.Namespace, pairs: Sequence[tuple[Curve, Curve]], outcome: Outcome
) -> None:
    """Compare the pairs that exist so far."""
    columns = [[*column] for column in zip(*pairs, strict=True)]
    for name in ("end", "mean"):
        calm, hurt = ([getattr(curve, name) for curve in each] for each in columns)
        outcome[f"p_{name}"] = paired_p_value(hurt, calm)
        outcome[f"interval_{name}"] = _interval(hurt, calm)
    outcome["curves"] = msgspec.to_builtins(pairs)
    lines = {each[0].name: mean_line([curve.held_out for curve in each]) for each in columns}
    kills = sum(outcome["kills"][0].values())
    title = f"bounded(2), mean of {len(pairs)} seeds, {kills} kills each or none"
    _draw(options.out / "bounded.svg", lines, title)
    print(*_told_differences(outcome), sep="\n", flush=True)
    _write(options.out / "bounded.json", outcome)


def _interval(hurt: Sequence[float], calm: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of the difference, None if there are too few pairs."""
    try:
        return paired_interval(hurt, calm, confidence=_CONFIDENCE)
    except ValueError:
        return None


def _told_differences(outcome: Outcome) -> list[str]:
    """Return the comparison of the pairs in words."""
    lines = []
    for name, what in (("end", "last value"), ("mean", "mean of the curve")):
        line, interval = f"{what}: p = {outcome[f'p_{name}']:.3f}", outcome[f"interval_{name}"]
        if interval is not None:
            low, high = interval
            line += f", hurt less undisturbed {low:+.3f} to {high:+.3f} ({_CONFIDENCE:.0%})"
        lines.append(line)
    return lines


def _study(options: argparse.Namespace, place: Path) -> None:
    """Repeat the same run with one setting of the loss changed at a time, over the same seeds."""
    found: dict[str, list[Curve]] = {name: [] for name in VARIANTS}
    for seed in range(options.seeds or _SEEDS):
        config = msgspec.structs.replace(STUDY, seed=seed)
        warmed = warm_up.warm_up(config, _task(config))
        for name, loss in VARIANTS.items():
            run = LaggedRun(msgspec.structs.replace(config, loss=loss), warmed)
            found[name].append(Curve(name=name, seed=seed, held_out=run.held_out_curve()))
            print(f"{name}, seed {seed}: {found[name][-1].end:.3f}", flush=True)
    lines = {name: mean_line([c.held_out for c in curves]) for name, curves in found.items()}
    title = f"{STUDY.described}, mean of {len(found[BASE])} seeds"
    _draw(options.out / "study.svg", lines, title)
    print(*_table(found, base=BASE), sep="\n")
    _write(options.out / "study.json", [curve for curves in found.values() for curve in curves])


def _precision(options: argparse.Namespace, place: Path) -> None:
    """Sample the job at its stable rate with weights of low precision, over the same seeds."""
    found: dict[str, list[Curve]] = {name: [] for name in PRECISIONS}
    for seed in range(options.seeds or _SEEDS):
        config = msgspec.structs.replace(STABLE, mode=Mode.FIXED_LAG, seed=seed)
        warmed = warm_up.warm_up(config, _task(config))
        for name, (precision, loss) in PRECISIONS.items():
            changed = msgspec.structs.replace(config, rollout_precision=precision, loss=loss)
            held_out = LaggedRun(changed, warmed).held_out_curve()
            found[name].append(Curve(name=name, seed=seed, held_out=held_out))
            print(f"{name}, seed {seed}: {found[name][-1].end:.3f}", flush=True)
    lines = {name: mean_line([c.held_out for c in curves]) for name, curves in found.items()}
    title = f"weights that sample, and correction: mean of {len(found['full'])} seeds"
    _draw(options.out / "precision.svg", lines, title)
    print(*_table(found, base="full"), sep="\n")
    _write(options.out / "precision.json", [c for curves in found.values() for c in curves])


def _task(config: RLConfig) -> Task:
    return make_task(config.task, seed=config.task_seed, exact_weight=config.exact_weight)


def _table(found: dict[str, list[Curve]], *, base: str) -> list[str]:
    """Return a study as a Markdown table; p compares the means of curves, paired by seed."""
    first = [curve.mean for curve in found[base]]
    rows = ["| setting | mean of the curve | last value | p |", "|---|---|---|---|"]
    for name, curves in found.items():
        means, ends = [curve.mean for curve in curves], [curve.end for curve in curves]
        p = "" if name == base else f"{paired_p_value(means, first):.2f}"
        columns = " | ".join(f"{fmean(each):.3f} ± {stdev(each):.3f}" for each in (means, ends))
        rows.append(f"| {name} | {columns} | {p} |")
    return rows


def _warmed(config: RLConfig, place: Path) -> RLConfig:
    """Return ``config`` with a warm start that is made now."""
    config = msgspec.structs.replace(config, warm_start=str(place))
    warm_up.prepare(config)
    return config


def _alone(name: str, config: RLConfig, place: Path) -> Curve:
    """Run a job in one process, and measure the processor time of the job and its sidecar."""
    files = _files(config, place)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*_MAIN, *files], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise JobFailedError(f"{name} failed: {done.stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _curve(name, config, _result(place), cpu_s=cpu_s)


def _job(
    name: str, config: RLConfig, place: Path, *, kills: int = 0, seed: int = 0
) -> DemoJobRecord:
    """Run a job of two trainers and two rollout workers, with three nodes more than are killed."""
    plan = _plan(kills, steps=config.steps)
    hold = place / "hold"
    files = _files(msgspec.structs.replace(config, hold=str(hold)), place)
    dying = sum(kill.kind == KILL_NODE for kill in plan)
    nodes = [f"n{at}" for at in range(dying + 3)]
    launch = LaunchConfig(
        command=(*_MAIN, *files),
        nodes=tuple(
            NodeSpec(name=node, domain=node, slots=dict.fromkeys(_WANTED, 1)) for node in nodes
        ),
        wanted=_WANTED,
        run_dir=place / "run",
        capture_output=True,
    )
    record = run_job(
        launch,
        result_file=place / "result.json",
        hold_file=hold,
        steps=config.steps,
        title=f"{name}, {kills} kills",
        console=Console(highlight=False, quiet=True),
        plan=plan,
        seed=seed,
    )
    ledger = record.result["ledger"]
    if not ledger["ok"] or record.kills_pending:
        raise JobFailedError(f"{name}: {record.kills_pending} kills left, {ledger['violations']}")
    return record


def _plan(kills: int, *, steps: int) -> tuple[Kill, ...]:
    """Spread kills evenly from a twentieth of the steps to nine tenths."""
    return tuple(
        Kill(kind=kind, step=int(steps * (0.05 + 0.85 * at / kills)), delay=(at % 4) / 4)
        for at, kind in enumerate(islice(cycle(_KILLS), kills))
    )


def _files(config: RLConfig, place: Path) -> tuple[str, ...]:
    """Write the settings; return the arguments that name the settings and the result."""
    place.mkdir()
    save_config(config, place / "config.json")
    return ("--config", str(place / "config.json"), "--result", str(place / "result.json"))


def _result(place: Path) -> Outcome:
    return msgspec.json.decode((place / "result.json").read_bytes(), type=Outcome)


def _curve(name: str, config: RLConfig, result: Outcome, *, cpu_s: float | None = None) -> Curve:
    return Curve(
        name=name,
        seed=config.seed,
        held_out=[(step, value) for step, value in result["heldout"]],
        final_hash=result["final_hash"],
        cpu_s=cpu_s,
    )


def _fault_steps(record: DemoJobRecord) -> list[float]:
    """Return the newest complete step at each kill."""
    steps, done = [], 0
    for event in record.events:
        match event:
            case StepDone(step=step):
                done = max(done, step)
            case FaultInjected():
                steps.append(float(done))
    return steps


def _told_kills(record: DemoJobRecord) -> dict[str, int]:
    return dict(Counter(event.what for event in of_kind(record.events, FaultInjected)))


def _draw(
    path: Path,
    lines: Mapping[str, Points],
    title: str,
    *,
    faults: Sequence[float] = (),
) -> None:
    path.write_text(picture(lines, title=title, faults=faults) + "\n", encoding="utf-8")


def _write(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


_COMMANDS: Final[dict[str, Callable[[argparse.Namespace, Path], None]]] = {
    "curves": _curves,
    "kills": _kills,
    "bounded": _bounded,
    "pairs": _pairs,
    "study": _study,
    "precision": _precision,
}

if __name__ == "__main__":
    sys.exit(main())
