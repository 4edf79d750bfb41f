"""Configurations survive their file, and errors name the wrong entry."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tree import ROOT

from holdfast.adapters.rl import main as job
from holdfast.adapters.rl.balance.settings import BalanceConfig
from holdfast.adapters.rl.config import RLConfig, load_config, preset, save_config
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.main import main
from holdfast.adapters.rl.weights import warm_up
from holdfast.elastic.errors import ConfigError


@pytest.mark.parametrize("name", ["quick", "full", "tiny", "reversal", "spiral"])
def test_a_preset_survives_its_file(name: str, tmp_path: Path) -> None:
    save_config(preset(name), tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == preset(name)


@pytest.mark.parametrize("page", ["reinforcement-learning", "policies"])
def test_every_example_of_the_guide_is_a_configuration(page: str) -> None:
    guide = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    examples = re.findall(r"^```json\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        assert msgspec.json.decode(example, type=RLConfig).steps


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="'huge' is not known; choose one of"):
        preset("huge")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "config.json: "),
        ('{"stepz": 3}', "`stepz`"),
        ('{"steps": 0}', "steps is 0, needed: at least 1"),
        ('{"group": 1}', "an advantage needs at least 2 samples"),
        ('{"groups": 3, "group": 3, "microbatches": 2}', "cannot be divided into 2 equal"),
        ('{"model": {"width": 100}}', "width 100 is no multiple of 16 x 4 heads"),
        ('{"loss": {"clip_low": 1.5}}', "clip_low is 1.5"),
        ('{"checkpoint_every": 0}', "checkpoint_every is 0, needed: at least 1"),
        ('{"tp": 3}', "tp is 3, needed: a divisor of 4 heads"),
        ('{"tp": 2, "pretrained": "/model"}', "Holdfast does not split a pretrained model"),
        ('{"tp": 2, "lora": {"rank": 4}}', "tp is 2: Holdfast does not split LoRA adapters"),
        ('{"lora": {"rank": 0}}', "rank is 0, needed: at least 1"),
        ('{"balance": {"window": 1}}', "BalanceConfig(window=1): give 2 or more steps"),
        ('{"balance": {"least_gain": 1}}', "BalanceConfig(least_gain=1.0): give a share from"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_a_missing_file_is_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(tmp_path / "none.json")]) == 2
    assert "cannot read the configuration: No such file" in capsys.readouterr().err


def test_the_warm_up_makes_the_directory_that_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[RLConfig] = []
    monkeypatch.setattr(warm_up, "prepare", made.append)
    config = msgspec.structs.replace(preset("tiny"), warm_start=str(tmp_path / "warm"))
    save_config(config, tmp_path / "config.json")
    assert main(["--warm-up", "--config", str(tmp_path / "config.json")]) == 0
    assert made == [config]


def test_a_warm_up_without_a_directory_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--warm-up", "--preset", "tiny"]) == 2
    assert "names no warm_start directory" in capsys.readouterr().err


def test_the_disk_that_the_command_line_names_is_known_to_every_role() -> None:
    options = job._parse(["--preset", "tiny"])
    assert job._config(options, {}).disk is None
    config = job._config(options, {"snapshots": {"disk": "/mnt/own", "parity": 1}})
    assert (config.disk, config.retained) == ("/mnt/own", config.eta)


def test_the_command_line_turns_balance_on_and_leaves_the_files_settings(tmp_path: Path) -> None:
    own = BalanceConfig(window=3)
    save_config(msgspec.structs.replace(preset("tiny"), balance=own), tmp_path / "own.json")
    words = ["--preset", "tiny"], ["--config", str(tmp_path / "own.json")]
    found = [job._config(job._parse([*each, "--balance"]), {}).balance for each in words]
    assert found == [BalanceConfig(), own]
    assert job._config(job._parse(words[0]), {}).balance is None


def test_balance_in_a_job_of_one_process_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--preset", "tiny", "--balance"]) == 2
    assert "one process is the whole job" in capsys.readouterr().err


def test_the_job_keeps_every_version_that_may_still_be_asked_to_sample() -> None:
    config = preset("full")
    assert config.keep == config.eta + 1
    assert RLConfig(eta=0).keep == 2


def test_earlier_versions_are_retained_only_where_a_cold_start_would_miss_them() -> None:
    def retained(**changes: object) -> int:
        return msgspec.structs.replace(RLConfig(eta=2, checkpoint="root"), **changes).retained

    recomputed, replay = LossConfig(proximal="recomputed"), ReplayConfig(policy="recent", max_age=3)
    assert retained() == 2
    assert retained(checkpoint=None, disk="/mnt/own") == 2
    assert retained(checkpoint=None) == retained(eta=0) == retained(mode=Mode.SYNC) == 0
    assert retained(mode=Mode.BOUNDED) == 0, "what is sampled goes on under any newer version"
    assert retained(mode=Mode.BOUNDED, loss=recomputed) == 2
    assert retained(loss=recomputed, replay=replay) == 5
    assert RLConfig(eta=2, loss=recomputed, replay=replay).keep == 6
