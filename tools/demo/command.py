"""`holdfast demo`: run the included RL job under kills and compare it with an undisturbed run."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.demo.job import DemoJobRecord, run_job
from holdfast.tools.demo.schedule import Kill, schedule
from holdfast.tools.demo.verdict import Evidence, judge
from holdfast.tools.environment import machine, software
from holdfast.tools.report import html, timeline
from holdfast.tools.report.record import (
    DemoReport,
    HeldOutResult,
    fault_rows,
    recovery_rows,
    summarise,
)
from holdfast.tools.report.snapshot_costs import Costs
from holdfast.tools.terminal import SafeConsole

if TYPE_CHECKING:
    from holdfast.adapters.rl.config import RLConfig
    from holdfast.tools.subcommand import Subparsers

ROLLOUT = "rollout"
_NODES = ("a", "b", "c")
_PRELOAD = ("holdfast.adapters.rl.library", "holdfast.adapters.rl.sampler_process")
"""Imported once for all workers of a job."""
_WANTED = {TRAINER: 2, ROLLOUT: 2}
_WARM_START = "warm-start"
_RUNS = "runs"


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "demo",
        help="train with reinforcement learning while processes are killed, and check the weights",
        description="Run the included RL job on three nodes of this machine while a seeded "
        "schedule kills a trainer, a rollout worker and a whole node; run it again undisturbed; "
        "compare the final weights bit for bit. Exits with 0 only if every check held.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a smaller job, under 90 s on 2 cores")
    add(
        "--report-dir",
        type=Path,
        default=Path("holdfast-report"),
        metavar="DIR",
        help="directory of report.json and report.html (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the schedule of kills (0)")
    add("--steps", type=int, metavar="N", help="optimizer steps of each job")
    add(
        "--engine",
        choices=("vllm",),
        help="sample with two servers of this engine, which must be on the PATH, and kill one",
    )
    add("--keep-runs", action="store_true", help="keep events, logs and warm start as well")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run both jobs and write the report; 0 only if every check held."""
    if args.engine is not None:
        return _with_engine(args)
    config, plan = _plan(args)
    runs = _prepare(args.report_dir)
    console = SafeConsole()
    config = _warm_up(config, runs / _WARM_START, console)
    hurt = _job(config, runs / "hurt", console, plan=plan, seed=args.seed)
    reference = _job(config, runs / "undisturbed", console)
    report = _report(args, config, hurt=hurt, reference=reference)
    write(report, args.report_dir)
    if report.passed and not args.keep_runs:
        shutil.rmtree(runs)
    _conclude(report, args.report_dir, console)
    return 0 if report.passed else 1


def _with_engine(args: argparse.Namespace) -> int:
    from holdfast.tools.vllm import demo

    default = demo.QUICK_STEPS if args.quick else demo.STEPS
    return demo.run(
        steps=default if args.steps is None else args.steps,
        seed=args.seed,
        folder=args.report_dir,
        keep=args.keep_runs,
        console=SafeConsole(),
    )


def _plan(args: argparse.Namespace) -> tuple[RLConfig, tuple[Kill, ...]]:
    from holdfast.adapters.rl.config import preset

    config = preset("quick" if args.quick else "full")
    steps = config.steps if args.steps is None else args.steps
    try:
        plan = schedule(args.seed, steps)
    except ValueError as error:
        raise ConfigError(f"--steps: {error}") from error
    return msgspec.structs.replace(config, steps=steps), plan


def _prepare(report_dir: Path) -> Path:
    """Make the report directory; return its empty directory for runs."""
    runs = report_dir / _RUNS
    try:
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--report-dir {report_dir}: {error.strerror}; give a directory that can be written"
        ) from error
    return runs


def _warm_up(config: RLConfig, place: Path, console: Console) -> RLConfig:
    """Train the model briefly on right answers first, so that it earns some reward."""
    from holdfast.adapters.rl.weights.warm_up import prepare

    config = msgspec.structs.replace(config, warm_start=str(place.absolute()))
    with console.status("pretraining the model on correct answers"):
        prepare(config)
    return config


def _job(
    config: RLConfig,
    run_dir: Path,
    console: Console,
    *,
    plan: tuple[Kill, ...] = (),
    seed: int = 0,
) -> DemoJobRecord:
    from holdfast.adapters.rl.config import save_config

    run_dir.mkdir()
    hold = run_dir.absolute() / "hold"
    save_config(msgspec.structs.replace(config, hold=str(hold)), run_dir / "config.json")
    files = ("--config", str(run_dir / "config.json"), "--result", str(run_dir / "result.json"))
    launch = LaunchConfig(
        command=(sys.executable, "-m", "holdfast.rl", *files),
        nodes=tuple(
            NodeSpec(name=name, domain=name, slots=dict.fromkeys(_WANTED, 1)) for name in _NODES
        ),
        wanted=_WANTED,
        run_dir=run_dir,
        capture_output=True,
        preload=_PRELOAD,
    )
    return run_job(
        launch,
        result_file=run_dir / "result.json",
        hold_file=hold,
        steps=config.steps,
        title=f"the job with {len(plan)} planned kills" if plan else "undisturbed",
        console=console,
        plan=plan,
        seed=seed,
    )


def _report(
    args: argparse.Namespace, config: RLConfig, *, hurt: DemoJobRecord, reference: DemoJobRecord
) -> DemoReport:
    story, calm = timeline.build(hurt.events), timeline.build(reference.events)
    verdict, failures = judge(
        Evidence(
            hurt=hurt.result,
            reference=reference.result,
            events=hurt.events,
            timeline=story,
            steps=config.steps,
            ordinals=config.steps * config.groups,
            kills_pending=hurt.kills_pending,
            killed_pids=hurt.killed_pids,
            leftovers=hurt.leftovers + reference.leftovers,
            must_learn=not args.quick,
        )
    )
    rows = recovery_rows(story)
    return DemoReport(
        verdict=verdict,
        failures=failures,
        faults=fault_rows(story),
        recoveries=rows,
        recovery_summary=summarise(rows),
        final_hash=hurt.result["final_hash"],
        reference_hash=reference.result["final_hash"],
        goodput=story.goodput,
        time_shares=story.shares,
        reference_goodput=calm.goodput,
        reference_time_shares=calm.shares,
        reward=hurt.result["reward"],
        reference_reward=reference.result["reward"],
        heldout=_held_out(hurt.result),
        ledger=hurt.result["ledger"],
        generations=[msgspec.to_builtins(span) for span in story.generations],
        steps=config.steps,
        wall_s=story.wall_s,
        reference_wall_s=calm.wall_s,
        config=_shown(config),
        software=software(),
        machine=machine(),
        seed=args.seed,
        command=_command(args),
        timeline=story,
        snapshots=Costs(hurt.events).total(),
    )


def _held_out(result: dict[str, Json]) -> list[HeldOutResult]:
    pairs = zip(result["heldout"], result["heldout_greedy"], strict=True)
    return [
        HeldOutResult(step=step, exact_match=expected, greedy=greedy)
        for (step, expected), (_, greedy) in pairs
    ]


def _shown(config: RLConfig) -> dict[str, str | int]:
    return {
        "mode": config.described,
        "task": config.task,
        "steps": config.steps,
        "prompts per step": config.groups,
        "samples per prompt": config.group,
        "microbatches per step": config.microbatches,
        "nodes": len(_NODES),
        "trainers": _WANTED[TRAINER],
        "rollout workers": _WANTED[ROLLOUT],
        "parity": config.parity,
        "snapshot every": "step",
    }


def _command(args: argparse.Namespace) -> str:
    words = ["holdfast demo", *(["--quick"] if args.quick else []), f"--seed {args.seed}"]
    return " ".join(words + ([f"--steps {args.steps}"] if args.steps is not None else []))


def write(report: DemoReport, report_dir: Path) -> None:
    """Write report.json and report.html."""
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    (report_dir / "report.json").write_bytes(encoded + b"\n")
    (report_dir / "report.html").write_text(html.render(report), encoding="utf-8")


def _conclude(report: DemoReport, report_dir: Path, console: Console) -> None:
    console.print()
    for name, passed in report.verdict.items():
        sign, style = ("✓", "green") if passed else ("✕", "bold red")
        console.print(f"  {sign} {html.CHECKS[name]}", style=style)
    for failure in report.failures:
        console.print(f"    {failure}", style="red", markup=False)
    console.print()
    for row in report.recoveries:
        console.print(
            f"  {row.fault} of {row.victim} at {row.time:.1f} s: "
            f"over after {html.seconds(row.total_s)}, {row.steps_lost} steps executed again"
        )
    console.print(f"  goodput {report.goodput:.1%}, final weights {report.final_hash}")
    if report.snapshots:
        console.print(f"  {report.snapshots}")
    console.print(f"  report: {report_dir / 'report.html'}", markup=False)
