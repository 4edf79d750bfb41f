"""Environments are found by name or import path; the built-in ones follow their descriptions."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest

from holdfast.adapters.rl.config import RLConfig, load_config, preset, save_config
from holdfast.adapters.rl.environments.base import HELD_OUT, Action, Environment, Observation
from holdfast.adapters.rl.environments.registry import BUILT_IN, EnvironmentConfig, make_environment
from holdfast.adapters.rl.environments.slow_tool import SlowTool
from holdfast.adapters.rl.environments.task import is_held_out, make_task
from holdfast.adapters.rl.environments.two_turns import TwoTurns, hint
from holdfast.elastic.errors import ConfigError

SOURCE = """
from holdfast.adapters.rl.environments.base import Observation

class Echo:
    def __init__(self, seed, loud=False):
        self.seed, self.loud = seed, loud
    def prompt(self, ordinal):
        return f"{self.seed + ordinal}>"
    def respond(self, action):
        return Observation(text=action.text.upper() if self.loud else action.text)

class Mute:
    def __init__(self, seed):
        pass

def picky(seed, mean):
    raise ValueError(f"mean is {mean}")

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with environments of one's own."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_broken.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def act(
    text: str, *, turn: int = 0, ordinal: int = 0, ended: bool = True, **more: object
) -> Action:
    fields = {"ordinal": ordinal, "sample": 0, "turn": turn, "text": text, "ended": ended}
    return Action(**(fields | more))


def test_an_environment_of_ones_own_is_imported_with_its_settings(module: str) -> None:
    config = EnvironmentConfig(factory=f"{module}:Echo", settings={"loud": True})
    environment = make_environment(config, seed=7)
    assert environment.prompt(1) == "8>"
    assert environment.respond(act("hi")) == Observation(text="HI")


@pytest.mark.parametrize(
    ("factory", "settings", "message"),
    [
        ("nonsense", {}, "'nonsense' is neither 'package.module:name' nor one of"),
        ("no.such.module:make", {}, r"cannot be imported: ModuleNotFoundError: .*PYTHONPATH"),
        ("{}:missing", {}, "has no attribute 'missing'"),
        ("{}_broken:make", {}, "cannot be imported: SyntaxError"),
        ("{}:number", {}, "is 3, needed: a callable"),
        ("{}:Mute", {}, "needed: an object with the methods prompt and respond"),
        ("{}:Echo", {"volume": 3}, r"does not take the settings \['seed', 'volume'\]: .*volume"),
        ("{}:picky", {"mean": 3}, "mean is 3"),
        ("two_turns", {"second": 2}, "second is 2, needed: above 0 and below 1"),
        ("two_turns", {"task": "chess"}, "task 'chess' is not known"),
        ("slow_tool", {"turns": 0}, "turns is 0, needed: at least 1"),
    ],
)
def test_an_environment_that_cannot_be_made_says_why(
    module: str, factory: str, settings: dict[str, object], message: str
) -> None:
    config = EnvironmentConfig(factory=factory.format(module), settings=settings)
    with pytest.raises(ConfigError, match=message):
        make_environment(config, seed=0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_environments_are_found_by_name(name: str) -> None:
    settings = {"url": "http://127.0.0.1:9"} if name in ("http", "mcp") else {}
    config = EnvironmentConfig(factory=name, settings=settings)
    assert isinstance(make_environment(config, seed=0), Environment)


def test_the_settings_of_an_environment_survive_the_jobs_file(tmp_path: Path) -> None:
    chosen = EnvironmentConfig(factory="two_turns", settings={"second": 0.25}, threads=3)
    config = msgspec.structs.replace(preset("tiny"), environment=chosen)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config
    assert config.limits.turns
    assert not RLConfig().limits.turns


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [('"threads": 0', "threads is 0"), ('"limit_s": 0', "limit_s is 0"), ('"x": 1', "`x`")],
)
def test_a_wrong_setting_of_an_environment_is_named(
    wrong: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"environment": {{"factory": "two_turns", {wrong}}}}}')
    with pytest.raises(ConfigError, match=complaint):
        load_config(path)


def test_an_environment_that_asks_for_frozen_policies_gets_those_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judged_by.py").write_text(
        "from two_and_more import Echo\n"
        "class Judged(Echo):\n"
        "    def __init__(self, seed, frozen_policies):\n"
        "        super().__init__(seed)\n"
        "        self.judge = frozen_policies.get('judge')\n"
    )
    (tmp_path / "two_and_more.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(factory="judged_by:Judged")
    judge = Likely()
    found = make_environment(config, seed=0, frozen_policies={"judge": judge})
    assert vars(found)["judge"] is judge
    assert vars(make_environment(config, seed=0))["judge"] is None


class Likely:
    """A frozen policy that finds everything certain."""

    def logprobs(self, text: str, answer: str, *, ended: bool = False) -> list[float]:
        return [0.0] * len(answer)


# -- a review ------------------------------------------------------------------------------------


def test_a_wrong_answer_is_reviewed_and_each_policy_earns_its_own() -> None:
    environment = make_environment(EnvironmentConfig(factory="reviewed"), seed=7)
    answer = make_task("reverse", seed=7).problem(3).answer
    assert environment.respond(act(answer, ordinal=3)) == Observation(reward=1.0)
    asked = environment.respond(act(answer[0], ordinal=3))
    first = asked.state["first"]
    assert (asked.text, asked.speaker, 0 < first < 0.5) == ("?", "critic", True)
    said = environment.respond(act("no", ordinal=3, turn=1, state=asked.state, speaker="critic"))
    assert (said.text, said.speaker, said.state) == ("!", "solver", asked.state)
    last = environment.respond(act(answer, ordinal=3, turn=2, state=said.state))
    assert last == Observation(reward=0.5, rewards={"solver": 0.5, "critic": 1.0 - first})
    worse = environment.respond(act("", ordinal=3, turn=2, state=said.state))
    assert worse.rewards == {"solver": 0.5 * first, "critic": 0.0}


# -- two turns -----------------------------------------------------------------------------------


def two_turns() -> TwoTurns:
    return TwoTurns(make_task("reverse", seed=7), second=0.5)


def test_a_right_first_answer_earns_everything_at_once() -> None:
    environment = two_turns()
    answer = make_task("reverse", seed=7).problem(3).answer
    assert environment.prompt(3) == f"{answer[::-1]}>"
    assert environment.respond(act(answer, ordinal=3)) == Observation(reward=1.0)
    assert environment.respond(act(answer, ordinal=3, ended=False)).reward is None


def test_a_wrong_first_answer_gets_a_hint_and_a_second_turn_for_less() -> None:
    environment = two_turns()
    answer = make_task("reverse", seed=7).problem(3).answer
    wrong = answer[0] + "?" * (len(answer) - 1)
    first = environment.respond(act(wrong, ordinal=3))
    assert first.text == answer[0] + "_" * (len(answer) - 1) + ">"
    assert first.reward is None
    again = environment.respond(act(answer, ordinal=3, turn=1, state=first.state))
    assert again == Observation(reward=0.5)
    worse = environment.respond(act("", ordinal=3, turn=1, state=first.state))
    assert worse.reward == 0.5 * first.state["first"] > 0


def test_hints_show_what_is_in_its_place() -> None:
    assert hint("abc", "") == "___>"
    assert hint("abc", "xbcde") == "_bc>"


def test_held_out_ordinals_have_prompts_no_training_ordinal_has() -> None:
    environment = two_turns()
    held_out = {environment.prompt(HELD_OUT + number) for number in range(100)}
    assert all(is_held_out(prompt) for prompt in held_out)
    assert len(held_out) > 90
    assert not any(is_held_out(environment.prompt(ordinal)) for ordinal in range(100))


# -- a slow tool ---------------------------------------------------------------------------------


def test_a_slow_tool_is_a_function_of_where_it_is_asked() -> None:
    slept: list[float] = []
    one, two = (SlowTool(seed=3, sleep=slept.append) for _ in range(2))
    action = act("ab", ordinal=5, turn=0)
    assert one.respond(action) == two.respond(action)
    assert slept[0] == slept[1] == one.latency_of(action)
    assert one.latency_of(act("xy", ordinal=5)) == slept[0], "what was said does not matter"
    others = [SlowTool(seed=4), SlowTool(seed=3)]
    assert others[0].latency_of(action) != slept[0] == others[1].latency_of(action)
    assert one.prompt(5) == two.prompt(5) != one.prompt(6)


def test_latencies_and_turns_have_the_mean_and_the_tail_that_were_asked_for() -> None:
    tool = SlowTool(latency_s=0.2, latency_tail=1.0, longest_s=60.0, turns=3.0, turns_tail=0.5)
    latencies = sorted(tool.latency_of(act("", ordinal=n, turn=n % 3)) for n in range(4000))
    assert statistics.mean(latencies) == pytest.approx(0.2, rel=0.1)
    assert latencies[3960] / statistics.median(latencies) == pytest.approx(10.2, rel=0.2)
    turns = [tool.turns_of(ordinal, ordinal % 4) for ordinal in range(4000)]
    assert statistics.mean(turns) == pytest.approx(3.0, rel=0.1)
    assert min(turns) >= 1
    assert 8 < max(turns) <= 16
    even = SlowTool(latency_s=0.2, latency_tail=0, turns=2, turns_tail=0)
    assert {even.latency_of(act("", ordinal=n)) for n in range(9)} == {0.2}
    assert {even.turns_of(n, 0) for n in range(9)} == {2}


def test_an_episode_with_a_slow_tool_ends_with_the_share_of_vowels() -> None:
    tool = SlowTool(turns=3, turns_tail=0, letters=5, letters_tail=0, sleep=lambda _: None)
    state, texts = None, []
    for turn, text in enumerate(("ab", "e")):
        reply = tool.respond(act(text, turn=turn, state=state))
        assert reply.reward is None
        texts.append(reply.text)
        state = msgspec.json.decode(reply.state_text)
    assert [len(text) for text in texts] == [6, 6]
    assert texts[0] != texts[1]
    assert tool.respond(act("x", turn=2, state=state)) == Observation(reward=0.5)
