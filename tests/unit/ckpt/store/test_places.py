"""Addresses select stores."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.cloud.store import CloudStore
from holdfast.ckpt.store.local import LocalStore
from holdfast.ckpt.store.places import locate, open_store
from holdfast.ckpt.store.s3.store import S3Store


def test_a_path_is_a_directory(tmp_path: Path) -> None:
    for root in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        store = open_store(root)
        assert isinstance(store, LocalStore)
        assert store.root == str(tmp_path)
    assert open_store("file:///with%20space").root == "/with space"


def test_an_s3_address_is_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    store = open_store("s3://bucket/prefix")
    assert isinstance(store, S3Store)
    assert store.root == "s3://bucket/prefix"


@pytest.mark.parametrize(
    ("root", "found"),
    [
        ("az://container/a/prefix/", "az://container/a/prefix"),
        ("AZ://container", "az://container"),
        ("gs://bucket/prefix", "gs://bucket/prefix"),
    ],
)
def test_an_address_of_azure_or_google_is_a_container(
    root: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    store = open_store(root)
    assert isinstance(store, CloudStore)
    assert (store.root, store.where("f")) == (found, f"{found}/f")


@pytest.mark.parametrize("root", ["hdfs://host/x", "abfss://a@b/x", "https://host/x"])
def test_other_kinds_are_refused(root: str) -> None:
    with pytest.raises(StoreError, match=r"not supported.*a directory, s3://bucket/prefix, gs:"):
        open_store(root)


def test_a_file_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StoreError, match="another machine, host"):
        open_store("file://host/path")


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "boto3":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(StoreError, match=r"install holdfast\[s3\]"):
        open_store("s3://bucket")


@pytest.mark.parametrize("root", ["gs://bucket", "az://container"])
def test_without_obstore_the_extra_is_named(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError, match=r"obstore is not installed.*install holdfast\[obstore\]"):
        open_store(root)


@pytest.mark.parametrize(
    ("path", "root", "step"),
    [
        ("/runs/a", "/runs/a", None),
        ("/runs/a/step-000000000042", "/runs/a", 42),
        ("/step-000000000042", "/", 42),
        ("/runs/step-42", "/runs/step-42", None),
        ("s3://b", "s3://b", None),
        ("s3://b/p/", "s3://b/p", None),
        ("s3://b/p/step-000000000042", "s3://b/p", 42),
        ("s3://b/p/step-000000000042/", "s3://b/p", 42),
        ("s3://b/step-000000000042", "s3://b", 42),
        ("gs://b/p/step-000000000042", "gs://b/p", 42),
        ("az://c/step-000000000042/", "az://c", 42),
        ("file:///runs/step-000000000042", "file:///runs", 42),
    ],
)
def test_a_step_is_split_off(path: str, root: str, step: int | None) -> None:
    assert locate(path) == (root, step)


def test_a_relative_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("runs/step-000000000001") == (f"{tmp_path}/runs", 1)
    assert locate(Path("runs")) == (f"{tmp_path}/runs", None)


@pytest.mark.parametrize(
    ("path", "said"),
    [("", "an empty path"), ("a\0b", "no null characters"), ("a\ud800", "surrogates not allowed")],
)
def test_a_text_that_can_be_no_path_is_refused(path: str, said: str) -> None:
    for use in (open_store, locate):
        with pytest.raises(StoreError, match=said):
            use(path)
