"""A classifier scores texts for the environment; its weights are compared as all frozen ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.adapters.rl.config import RLConfig, load_config, preset
from holdfast.adapters.rl.environments.base import Action
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.environments.starting import start_environment
from holdfast.adapters.rl.policy.policy import parameter_names
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.elastic.errors import ConfigError, JobFailedError

pytest.importorskip("transformers")
import transformers
from pretrained_models import CLASSIFIER, save_classifier, saved

from holdfast.adapters.rl.policy.classifier import Classifier

torch.set_num_threads(1)

SCORED = """
from holdfast.rl import Observation


class Scored:
    def __init__(self, seed, frozen_policies):
        self.model = frozen_policies["reward"]

    def prompt(self, ordinal):
        return "say>"

    def respond(self, action):
        return Observation(reward=self.model.scores("say>", action.text)[0])
"""


def scored_by(directory: str) -> RLConfig:
    """Return a job whose environment asks a classifier."""
    environment = EnvironmentConfig(factory="scored:Scored")
    return msgspec.structs.replace(
        preset("tiny"), environment=environment, classifiers={"reward": directory}
    )


@pytest.mark.parametrize("answer", [None, "cd"])
def test_scores_are_the_logits_of_the_model(tmp_path: Path, answer: str | None) -> None:
    directory = save_classifier(tmp_path, classes=3)
    made = Classifier("judge", directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    row = transformers.AutoTokenizer.from_pretrained(directory)("ab>", answer, return_tensors="pt")
    assert made.scores("ab>", answer) == model(**row).logits[0].tolist()
    assert made.scores("ab>", answer) == Classifier("judge", directory).scores("ab>", answer)
    assert made.classes == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_all_processes_compare_weights_and_tokenizers(tmp_path: Path) -> None:
    def digest(name: str, **given: int) -> str | None:
        return Policies(scored_by(save_classifier(tmp_path / name, **given))).frozen

    one = digest("one")
    assert one == digest("copy")
    assert None not in {one}
    assert len({one, digest("seed", seed=12), digest("shift", shift=1)}) == 3


def test_a_snapshot_has_the_digests_of_its_weights(tmp_path: Path) -> None:
    policies = Policies(scored_by(save_classifier(tmp_path)))
    assert policies.frozen_weights is not None
    names = parameter_names(policies.frozen_weights)
    assert "classifiers.reward.classifier.weight" in names
    assert "classifiers.reward.description" in names


def test_the_environment_asks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scored.py").write_text(SCORED)
    monkeypatch.syspath_prepend(tmp_path)
    config = scored_by(save_classifier(tmp_path / "model"))
    assert config.environment is not None
    classifiers = Policies(config).classifiers
    environment = start_environment(
        config.environment, seed=1, owner="a test", frozen_policies=classifiers
    )
    action = Action(ordinal=0, sample=0, turn=0, text="ab", ended=True)
    assert environment.respond(action).reward == classifiers["reward"].scores("say>", "ab")[0]


def test_a_language_model_is_no_classifier() -> None:
    with pytest.raises(ConfigError, match=r"no weights for score.weight.*trained to classify"):
        Classifier("judge", saved("llama"))


@pytest.mark.parametrize("text", ["", "a" * 33])
def test_a_text_that_it_cannot_read_is_refused(tmp_path: Path, text: str) -> None:
    made = Classifier("judge", save_classifier(tmp_path))
    with pytest.raises(JobFailedError, match=r"classifier judge was asked .* give it 1 to 32"):
        made.scores(text)


def test_a_model_whose_positions_begin_later_refuses_as_well(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**CLASSIFIER, num_labels=1, pad_token_id=1)
    directory = save_classifier(tmp_path)
    transformers.RobertaForSequenceClassification(config).save_pretrained(directory)
    made = Classifier("judge", directory)
    assert made.scores("a" * 30)
    with pytest.raises(JobFailedError, match=r"score a text of 31 tokens.*give it fewer"):
        made.scores("a" * 31)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ('"classifiers": {"Judge": "x"}', "cannot be a name"),
        ('"classifiers": {"judge": "x"}', "only an environment asks them"),
        (
            '"environment": {"factory": "reviewed"}, "classifiers": {"solver": "x"}, '
            '"policies": {"solver": {}, "critic": {}}',
            "there is a policy 'solver' too",
        ),
    ],
)
def test_names_and_jobs_that_cannot_be_are_refused(
    tmp_path: Path, settings: str, complaint: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(f"{{{settings}}}")
    with pytest.raises(ConfigError, match=complaint):
        load_config(path)
