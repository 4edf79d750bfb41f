"""`holdfast islands key` makes a key once."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.islands.haul.direct import sea_key
from holdfast.tools import cli


def test_a_key_is_made_once_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys" / "sea.key"
    assert cli.main(["islands", "key", str(file)]) == 0
    assert "copy it to the machines of all its islands" in " ".join(capsys.readouterr().out.split())
    assert file.stat().st_mode & 0o777 == 0o600
    made = sea_key(str(file), run=RunKey.new())
    assert cli.main(["islands", "key", str(file)]) == 2
    assert "name a file that is not there yet" in " ".join(capsys.readouterr().err.split())
    assert RunKey.load(file) == made
