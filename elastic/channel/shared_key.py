"""The key that a job's launchers on several machines share, in a file that all can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import ConfigError

KEY_FILE_ENV: Final = "HOLDFAST_KEY_FILE"
"""Environment variable that names the key file."""

_OTHERS = 0o007


def shared_key_file(given: str | Path | None = None) -> Path:
    """Return the key file: the given one, that of ``HOLDFAST_KEY_FILE``, or the user's own.

    The user's own, ``~/.config/holdfast/key.json``, serves every machine that shares the home
    directory. Raises ``ConfigError`` for a user who has none.
    """
    if named := given or os.environ.get(KEY_FILE_ENV):
        return expanded(named).absolute()
    config = os.environ.get("XDG_CONFIG_HOME") or expanded("~/.config")
    return Path(config, "holdfast", "key.json")


def expanded(path: str | Path) -> Path:
    """Return a path with the home directory for ``~``.

    Raises ``ConfigError`` for a user who has none.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: this user has no home directory; set HOME, or name the file with "
            f"{KEY_FILE_ENV} or the option for it"
        ) from error


def shared_key(path: Path) -> RunKey:
    """Return the key in ``path``; make it if there is no such file.

    If several processes make it at once, one wins, and all return its key. Raises ``ConfigError``
    if the file cannot be made or read, holds no key, or is readable by others.
    """
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & _OTHERS:
            raise ConfigError(
                f"{path}: other users can read this key, which admits whoever has it: "
                f"chmod o-rwx {path}"
            )
        return RunKey.load(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a key file that can be read with {KEY_FILE_ENV} or "
            "the launcher's option, the same content on every machine"
        ) from error
    except PeerError as error:
        raise ConfigError(f"{error}; remove the file to have a new one made") from error


def _make(path: Path) -> None:
    """Write a new key next to ``path`` and link it there, so that no process sees half a key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        RunKey.new().save(fresh)
        os.link(fresh, path)
    except FileExistsError:
        pass  # another process was faster: its key is used
    finally:
        fresh.unlink(missing_ok=True)
