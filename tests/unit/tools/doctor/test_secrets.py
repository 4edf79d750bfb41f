"""Secrets are removed wherever they stand; what is none stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tools.doctor.secrets import Redactor, is_secret_name, secrets_of

SECRET = "hunter2-Zq9x"


@pytest.mark.parametrize(
    "line",
    [
        f"password={SECRET}",
        f"PASSWORD: {SECRET}",
        f'{{"password": "{SECRET}", "step": 3}}',
        f'{{"db_passwd":"{SECRET}"}}',
        f"{{'api_key': '{SECRET}'}}",
        f'\\"auth_token\\": \\"{SECRET}\\"',
        f"WANDB_API_KEY={SECRET} python train.py",
        f"AWS_SECRET_ACCESS_KEY => {SECRET}",
        f"hf login --token {SECRET}",
        f"hf login --token={SECRET}",
        f'["login", "--token", "{SECRET}"]',
        f"--notice-header X-Auth={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"authorization: Basic {SECRET}",
        f'{{"Authorization": "Basic {SECRET}"}}',
        f'Authorization: Digest username="u", response="{SECRET}"',
        f"s3://user:{SECRET}@host/bucket",
        f"https://{SECRET}@github.com/x.git",
        f"postgres://u:p@{SECRET}@host/db",
        f"https://b.s3.amazonaws.com/x?X-Amz-Credential=a&X-Amz-Signature={SECRET}",
        f"https://x.blob.core.windows.net/c?sv=1&sig={SECRET}",
        f"GET https://host/x?a=1&access_token={SECRET} HTTP/1.1",
        f"cookie: session={SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\nabc=\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\\n{SECRET}",
        f"MIIB{SECRET.replace('-', '')}\nabc=\n-----END PRIVATE KEY-----",
    ],
)
def test_a_secret_is_recognised_by_what_stands_around_it(line: str) -> None:
    redactor = Redactor({})
    text = redactor.text(f"before\n{line}\nafter" if "-----END" not in line else line)
    assert SECRET not in text
    assert SECRET.replace("-", "") not in text
    assert "[removed: " in text
    assert redactor.removed.total() >= 1


@pytest.mark.parametrize(
    "token",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "hf_abcdefghijklmnopqrst",
        "sk-proj-abcdefghijklmnopqrst",
        "xoxb-123456789012-abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP",
    ],
)
def test_a_token_is_recognised_by_its_form(token: str) -> None:
    assert Redactor({}).text(f"it was {token}, said the log") == (
        "it was [removed: token], said the log"
    )


@pytest.mark.parametrize(
    "line",
    [
        "step 5, loss 0.25, 1024 tokens, tokens_per_s=900",
        '{"kind":"step","v":2,"unfinished_tokens":512,"seat":"trainer/0"}',
        "key_file=/run/key.json HOLDFAST_KEY_FILE: /run/key.json",
        "--key-file /run/key.json --run-dir runs/live",
        "tokenizer: gpt2",
        "the author of authority",
        "https://host/page?step=5&view=all",
        "tcp://127.0.0.1:42119",
        "keyword=4 keyboard: none",
        "passed: 5, compass=north",
        "token: null",
        "basic settings",
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    redactor = Redactor({})
    assert redactor.text(line) == line
    assert not redactor.removed


def test_a_known_secret_is_removed_wherever_it_stands() -> None:
    known = {"p@ss w/rd": "the key", "short": "too short"}
    text = Redactor(known).text('a p@ss w/rd, p%40ss%20w%2Frd in an address; short stays\n"q\\"q"')
    assert text.splitlines()[0] == (
        "a [removed: the key], [removed: the key] in an address; short stays"
    )


def test_json_stays_json() -> None:
    content = {"token": 123456, "password": "a", "nested": {"api_key": SECRET, "n": 5}}
    read = json.loads(Redactor({}).text(json.dumps(content)))
    assert read["nested"]["n"] == 5
    assert read["token"] == read["password"] == read["nested"]["api_key"]


def test_the_values_of_secret_variables_are_secrets() -> None:
    environment = {
        "WANDB_API_KEY": SECRET,
        "HF_TOKEN": "hf",
        "HOLDFAST_KEY_FILE": "/run/key.json",
        "PWD": "/home/somebody",
        "SSH_AUTH_SOCK": "/tmp/agent.sock",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"/x:{SECRET}",
    }
    assert secrets_of(environment) == {SECRET: "variable WANDB_API_KEY", "hf": "variable HF_TOKEN"}
    kept = Redactor(secrets_of(environment)).variables(environment)
    assert SECRET not in str(kept)
    assert kept["HF_TOKEN"] == "[removed: variable HF_TOKEN]"
    assert kept["PWD"] == "/home/somebody"
    assert not is_secret_name("HOLDFAST_RUN")


@given(st.text(max_size=200), st.text(st.characters(categories=["L", "N"]), min_size=8))
def test_any_text_around_a_known_secret_is_without_it(text: str, secret: str) -> None:
    found = Redactor({secret: "known"}).text(text + secret + text)
    assert secret not in found.replace("[removed: known]", "\n")
