"""Training loops with one planted misuse each, made from one template, and loops that are right."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TEMPLATE: Final = """\
import copy, os, random, time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
import holdfast

torch.set_num_threads(1)
DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
{module}

@holdfast.resilient(batch=holdfast.Batch(microbatches=4, size=4), exact={exact})
def train(run):
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
{build}
    run.track(net=net, opt=opt{tracked})
{before}
    for step in run.{steps}:
{top}
        for {item} in {passes}:
{inside}
            loss = {loss}
            {backward}
            run.log(loss=loss.detach())
{after}
{update}
{tail}


train()
"""
_LOSS: Final = "(net(x).squeeze(1) - x.sum(1)).square().mean()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop: the pieces in which it differs from the plain one.

    ``said`` is an expression that the finding matches; empty for a loop that is right. ``shows`` is
    the property that is hurt.
    """

    name: str
    said: str = ""
    shows: str = "ranks"
    module: str = ""
    exact: str = '"float32"'
    build: str = ""
    tracked: str = ""
    before: str = ""
    steps: str = "steps(50)"
    top: str = ""
    item: str = "x"
    data: str = "DATA"
    passes: str = ""
    inside: str = ""
    loss: str = _LOSS
    backward: str = "run.backward(loss)"
    after: str = ""
    update: str = "run.step(opt)"
    tail: str = ""

    def write(self, folder: Path) -> Path:
        """Write the script."""
        path = folder / f"{self.name}.py"
        indents = {"build": 4, "before": 4, "top": 8, "inside": 12, "after": 12}
        indents |= {"update": 8, "tail": 8, "module": 0}
        pieces = {
            name: textwrap.indent(textwrap.dedent(getattr(self, name)).strip("\n"), " " * indent)
            for name, indent in indents.items()
        }
        rest = ("exact", "tracked", "steps", "item", "loss", "backward")
        pieces |= {name: getattr(self, name) for name in rest}
        pieces["passes"] = self.passes or f"run.microbatches({self.data})"
        path.write_text(_TEMPLATE.format(**pieces))
        return path


_SECOND: Final = "head = torch.optim.SGD(net[2].parameters(), lr=1e-2, momentum=0.9)"
_NOISE_DATA: Final = """
class Noisy(Dataset):
    def __init__(self): self.own = random.Random(0)
    def __len__(self): return 64
    def __getitem__(self, i): return DATA[i] + self.own.gauss(0, 1)
"""
_STREAM: Final = """
class Stream(IterableDataset):
    def __init__(self, rank, world): self.mine = DATA[rank::world]
    def __iter__(self): return iter(self.mine.repeat(9, 1))
"""
_WRAPPED: Final = """
class Wrapped:
    def __init__(self, g): self.g = g
    def state_dict(self): return {"state": self.g.get_state()}
    def load_state_dict(self, saved): self.g.set_state(saved["state"])
"""
_DICE: Final = """
class Dice:
    def __init__(self): self.rolls = 0
    def state_dict(self): return {"rolls": self.rolls}
    def load_state_dict(self, saved): pass
"""

MISUSES: Final = (
    # -- data ------------------------------------------------------------------------------------
    Loop(
        name="own_loader",
        said=r"DataLoader (iterator )?made at own_loader\.py:\d+",
        build="loader = DataLoader(DATA, batch_size=4, shuffle=True)",
        before="own = (b for _ in range(99) for b in loader)",
        item="_",
        data="",
        inside="x = next(own)",
    ),
    Loop(
        name="own_loader_in_order",
        said=r"DataLoader (iterator )?made at own_loader_in_order\.py:\d+",
        shows="kills",
        before="own = (b for _ in range(99) for b in DataLoader(DATA, batch_size=4))",
        item="_",
        data="",
        inside="x = next(own)",
    ),
    Loop(
        name="divided_by_rank",
        said=r"data set given at divided_by_rank\.py:\d+ is not the same.*whole data set",
        build="mine = DATA[run.rank::run.world_size]",
        data="mine",
    ),
    Loop(
        name="stream_by_rank",
        said=r"other input.*run\.rank is read at stream_by_rank\.py:\d+",
        module=_STREAM,
        build="loader = run.loader(Stream(run.rank, run.world_size), batch=16)",
        data="loader",
    ),
    Loop(
        name="shuffled_by_own_random",
        said=r"random\.Random that is not the run's is used at shuffled_by_own_random\.py:\d+",
        shows="again",
        build="order = list(range(64)); random.Random().shuffle(order); mine = DATA[order]",
        data="mine",
    ),
    Loop(
        name="split_by_unseeded_numpy",
        said=r"NumPy generator .* at split_by_unseeded_numpy\.py:\d+",
        shows="again",
        build="mine = DATA[np.random.default_rng().permutation(64)[:48]]",
        data="mine",
    ),
    Loop(
        name="noise_of_the_data_set",
        said=r"random\.Random .* at noise_of_the_data_set\.py:\d+",
        module=_NOISE_DATA,
        build="noisy = Noisy()",
        data="noisy",
    ),
    Loop(
        name="data_changed_in_place",
        said=r"other input.*run\.microbatches at data_changed_in_place\.py:\d+",
        after="DATA.mul_(0.99)",
    ),
    Loop(
        name="vocabulary_of_a_set",
        said=r"order of a set|`vocabulary`",
        shows="again",
        build="vocabulary = list({'red', 'green', 'blue', 'black', 'white', 'grey', 'pink'})",
        loss=_LOSS + " * (1 + vocabulary.index('red'))",
    ),
    # -- randomness ------------------------------------------------------------------------------
    Loop(
        name="own_generator",
        said=r"generator `own` of the script, used at own_generator\.py:\d+.*run\.generator",
        build="own = torch.Generator().manual_seed(42)",
        inside="x = x + torch.randn(x.shape, generator=own)",
    ),
    Loop(
        name="own_generator_without_exact",
        said=r"generator that is not the run's is used at own_generator_without_exact\.py:\d+",
        exact="None",
        build="own = torch.Generator().manual_seed(42)",
        inside="x = x + torch.randn(x.shape, generator=own)",
    ),
    Loop(
        name="own_generator_tracked",
        said=r"generator that is not the run's is used at own_generator_tracked\.py:\d+|own",
        module=_WRAPPED,
        build="own = torch.Generator().manual_seed(42)",
        tracked=", own=Wrapped(own)",
        inside="x = x + torch.randn(x.shape, generator=own)",
    ),
    Loop(
        name="own_numpy_generator",
        said=r"generator `own` of the script, used at own_numpy_generator\.py:\d+.*default_rng",
        build="own = np.random.default_rng(0)",
        inside="x = x + float(own.normal())",
    ),
    Loop(
        name="own_random",
        said=r"random\.Random that is not the run's is used at own_random\.py:\d+",
        exact="None",
        build="own = random.Random(7)",
        inside="x = x * own.uniform(0.9, 1.1)",
    ),
    Loop(
        name="seeded_by_the_clock",
        said=r"other draws.*clock is read at seeded_by_the_clock\.py:\d+",
        shows="again",
        inside="torch.manual_seed(time.time_ns() % 2**31); x = x + torch.randn(x.shape)",
    ),
    Loop(
        name="reseeded_without_a_seed",
        said=r"other draws from torch's generator",
        shows="again",
        inside="torch.seed(); x = x + torch.randn(x.shape)",
    ),
    # -- the world -------------------------------------------------------------------------------
    Loop(
        name="lr_by_rank",
        said=r"`opt\.[\w.]*lr` is 0\.02 where it was 0\.01|opt\.[\w.]*lr",
        build="opt = torch.optim.AdamW(net.parameters(), lr=1e-2 * (1 + run.rank))",
    ),
    Loop(
        name="loss_by_world_size",
        said=r"run\.world_size is read at loss_by_world_size\.py:\d+",
        loss=_LOSS + " / run.world_size",
    ),
    Loop(
        name="loss_by_rank_of_torch",
        said=r"get_rank is read at loss_by_rank_of_torch\.py:\d+",
        loss=_LOSS + " * (1 + dist.get_rank())",
    ),
    Loop(
        name="loss_by_share",
        said=r"the loss is .*run\.share is read at loss_by_share\.py:\d+",
        loss=_LOSS + " / run.share",
    ),
    Loop(
        name="position_in_the_share",
        said=r"the loss is .*position_in_the_share\.py:\d+",
        item="i, x",
        passes="enumerate(run.microbatches(DATA))",
        loss=_LOSS + " * (1 + i)",
    ),
    Loop(
        name="all_reduce_in_a_microbatch",
        said=r"all_reduce|collective|the loss is",
        inside="t = x.mean(); dist.all_reduce(t)",
        loss=_LOSS + " + t * net[2].bias.sum()",
    ),
    Loop(
        name="tracked_by_rank",
        said=r"`?mark",
        build="mark = torch.full((4,), float(run.rank))",
        tracked=", mark=mark",
    ),
    # -- the machine -----------------------------------------------------------------------------
    Loop(
        name="clock_in_the_loss",
        said=r"clock is read at clock_in_the_loss\.py:\d+",
        shows="again",
        loss=_LOSS + " * (1 + time.time() % 1)",
    ),
    Loop(
        name="lr_by_the_clock",
        said=r"`opt\.[\w.]*lr`",
        shows="again",
        before="began = time.monotonic()",
        tail="opt.param_groups[0]['lr'] = 1e-2 / (1 + time.monotonic() - began)",
    ),
    Loop(
        name="process_id",
        said=r"the loss is .*process_id\.py:\d+",
        shows="again",
        loss=_LOSS + " * (1 + os.getpid() % 1000)",
    ),
    Loop(
        name="environment",
        said=r"environment is read at environment\.py:\d+",
        shows="again",
        loss=_LOSS + " * (1 + int(os.environ['PYTHONHASHSEED']))",
    ),
    # -- between microbatches --------------------------------------------------------------------
    Loop(
        name="cache",
        said=r"the loss is .*`CACHE` is passed from one microbatch to the next",
        module="CACHE = [torch.zeros(())]",
        inside="CACHE.append(x.mean())",
        loss=_LOSS + " + CACHE[-2] * net[2].bias.sum()",
    ),
    Loop(
        name="hidden_state",
        said=r"the loss is .*`hidden` is passed from one microbatch to the next",
        before="hidden = torch.zeros(8)",
        inside="x = x + hidden; hidden = torch.tanh(x.mean(0)).detach()",
    ),
    Loop(
        name="mixed_with_the_one_before",
        said=r"the loss is .*`last` is passed from one microbatch to the next",
        before="last = None",
        inside="seen = x; x = x if last is None else 0.7 * x + 0.3 * last; last = seen",
    ),
    Loop(
        name="curriculum_by_own_count",
        said=r"the loss is .*`seen` is passed from one microbatch to the next",
        before="seen = 0",
        inside="seen += len(x); x = x * min(1.0, 0.2 + seen / 100)",
    ),
    Loop(
        name="queue_of_negatives",
        said=r"the loss is .*`queue` is passed from one microbatch to the next",
        before="queue = torch.zeros(8, 8)",
        loss=_LOSS + " + (net(queue).mean() - 1).square()",
        after="queue = torch.cat([x, queue])[:8].detach()",
    ),
    # -- gradients and optimizers ----------------------------------------------------------------
    Loop(
        name="zero_grad_in_the_pass",
        said=r"zero_grad.*zero_grad_in_the_pass\.py:\d+",
        inside="opt.zero_grad()",
    ),
    Loop(
        name="module_zero_grad_in_the_pass",
        said=r"zero_grad.*module_zero_grad_in_the_pass\.py:\d+|gradient",
        inside="net.zero_grad()",
    ),
    Loop(
        name="gradients_dropped",
        said=r"gradient of net\.0\.weight was dropped \(\.grad = None\)",
        inside="for p in net.parameters(): p.grad = None",
    ),
    Loop(
        name="gradients_zeroed_by_their_data",
        said=r"net\.[\w.]* was set to zero between two microbatches .*by_their_data\.py:\d+",
        inside="for p in net.parameters():\n    if p.grad is not None: p.grad.data.zero_()",
    ),
    Loop(
        name="stepped_by_hand",
        said=r"by hand|SGD|head",
        build=_SECOND,
        tracked=", head=head",
        update="head.step(); run.step(opt)",
    ),
    Loop(
        name="stepped_by_hand_after",
        said=r"by hand|SGD|head",
        build=_SECOND,
        tracked=", head=head",
        update="run.step(opt); head.step()",
    ),
    Loop(name="stepped_twice", said=r"run\.step", update="run.step(opt); run.step(opt)"),
    Loop(name="never_stepped", said=r"run\.step", update="opt.step(); opt.zero_grad()"),
    Loop(name="plain_backward", said=r"run\.backward|backward", backward="loss.backward()"),
    Loop(
        name="untracked_optimizer",
        said=r"SGD|head|track",
        shows="kills",
        build=_SECOND,
        update="run.step(opt, head)",
    ),
    Loop(
        name="untracked_scheduler",
        said=r"LambdaLR made at untracked_scheduler\.py:\d+ .*not in run\.track",
        shows="kills",
        build="schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t))",
        tail="schedule.step()",
    ),
    Loop(
        name="scheduler_after_track",
        said=r"LambdaLR|schedul|track|`opt\.[\w.]*lr`",
        shows="kills",
        before="schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t))",
        tail="schedule.step()",
    ),
    # -- state -----------------------------------------------------------------------------------
    Loop(
        name="untracked_average",
        said=r"`average`",
        shows="kills",
        before="average = copy.deepcopy(net)",
        tail="for a, p in zip(average.parameters(), net.parameters()): a.data.lerp_(p.data, 0.1)",
    ),
    Loop(
        name="untracked_counter",
        said=r"`count` is 0 where it was \d|`opt\.[\w.]*lr`",
        shows="kills",
        before="count = 0",
        tail="count += 1; opt.param_groups[0]['lr'] = 1e-2 / (1 + count)",
    ),
    Loop(
        name="untracked_best",
        said=r"`best` is 9 where it was",
        shows="kills",
        before="best = 9.0",
        tail="best = min(best, 5.0 - step)",
    ),
    Loop(
        name="tracked_number",
        said=r"run\.track\(best=9\.0\)",
        shows="kills",
        build="best = 9.0",
        tracked=", best=best",
        tail="best = min(best, 5.0 - step)",
    ),
    Loop(
        name="replay_buffer",
        said=r"`?replay",
        shows="kills",
        before="replay = []",
        tail="replay.append(float(step))",
    ),
    Loop(
        name="attribute_of_the_trainer",
        said=r"`progress\.seen` is 0 where it was \d",
        shows="kills",
        module="class Progress:\n    seen = 0\n    def __init__(self): self.seen = 0",
        before="progress = Progress()",
        tail="progress.seen += 1",
    ),
    Loop(
        name="own_state_half_restored",
        said=r"step \d, after the restore: `dice@\d\.rolls` is \d where it was \d",
        shows="kills",
        module=_DICE,
        build="dice = Dice()",
        tracked=", dice=holdfast.PerRank(dice)",
        tail="dice.rolls += 1",
    ),
    # -- leaving ---------------------------------------------------------------------------------
    Loop(
        name="leader_breaks",
        said=r"rank 0 left the loop at step 4|left",
        tail="if run.is_leader and step == 3: break",
    ),
    Loop(
        name="leader_returns",
        said=r"rank 0 left the loop at step 4|left",
        tail="if run.is_leader and step == 3: return",
    ),
    Loop(
        name="own_count_of_samples",
        said=r"loop was left at step \d.*`seen` .* at own_count_of_samples\.py:\d+",
        before="seen = 0",
        after="seen += len(x)",
        tail="if seen >= 64: break",
    ),
)

RIGHT: Final = (
    Loop(name="plain"),
    Loop(name="not_exact", exact="None"),
    Loop(name="fixed_point", exact='"int64"'),
    Loop(
        name="all_the_usual",
        build="""
            schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
            progress = {"best": 9.0, "seen": 0}
            held_out = DataLoader(DATA[:8], batch_size=4)
        """,
        tracked=", schedule=schedule, progress=progress",
        before="began, total, times = time.time(), 0.0, []",
        inside="x = x + 0.1 * torch.randn(x.shape) + np.random.normal() * random.random()",
        after="total += loss.item()",
        tail="""
            schedule.step()
            with torch.no_grad():
                score = sum(float(net(y).mean()) for y in held_out)
            progress["best"] = min(progress["best"], score); progress["seen"] += 1
            times.append(time.time() - began)
        """,
    ),
    Loop(
        name="epochs_of_a_loader",
        build="loader = run.loader(DATA, batch=16)",
        steps="epochs(3, loader)",
        data="loader",
    ),
)
