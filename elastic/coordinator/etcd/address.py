"""The address of an etcd and its connection options, as one line of text.

``etcd://[USER@]HOST:PORT[,HOST:PORT...][/PREFIX][?OPTION=FILE&...]``; ``etcds://`` uses TLS. The
options are files on every node: ``password`` (of USER), ``ca`` (trusted authorities; the system's
by default), ``cert`` and ``key`` (the client's own certificate).

``managed://HOST[:PORT][,HOST[:PORT]...][/TOKEN]`` is an etcd whose members the job's launchers run.
Its certificates follow from the job's key, and its members change: the hosts are those at which a
client begins. The token names one cluster, so that no client takes another for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from holdfast.elastic.addresses import is_this_machine
from holdfast.elastic.errors import ConfigError

PLAIN: Final = "etcd"
SECURE: Final = "etcds"
MANAGED: Final = "managed"
DEFAULT_PREFIX: Final = "holdfast/"
_DEFAULT_PORT: Final = 2379
_MANAGED_PORT: Final = 29400
_OPTIONS: Final = ("password", "ca", "cert", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """The members' ``host:port``, the prefix of every key, and the client's files."""

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    secure: bool = False
    user: str = ""
    password: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    managed: bool = False
    token: str = ""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("no etcd member is named: write etcd://HOST:PORT")
        if bool(self.user) != bool(self.password):
            raise ConfigError(
                "etcd needs both a user and the file with the password: write "
                "etcd://USER@HOST:PORT?password=FILE"
            )
        if bool(self.cert) != bool(self.key):
            raise ConfigError(
                "a certificate for etcd needs its key, and a key its certificate: give cert=FILE "
                "and key=FILE"
            )
        if not self.secure and (self.ca or self.cert):
            raise ConfigError("certificates are given, but etcd:// is without TLS: write etcds://")

    @classmethod
    def parse(cls, url: str) -> EtcdAddress:
        """Return the address in ``url``. Raises ``ConfigError`` that names the fault."""
        scheme, _, rest = url.partition("://")
        if scheme == MANAGED:
            return cls._of_managed(url, rest)
        if scheme not in (PLAIN, SECURE) or not rest:
            raise ConfigError(f"{url}: not an address of etcd; write etcd://HOST:PORT")
        place, _, query = rest.partition("?")
        authority, _, prefix = place.partition("/")
        user, _, hosts = authority.rpartition("@")
        if ":" in user:
            raise ConfigError(
                "an address of etcd has a password in it, which others could read: write "
                "etcd://USER@HOST:PORT?password=FILE"
            )
        options: dict[str, Any] = dict(parse_qsl(query))
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise ConfigError(f"{url}: no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}")
        return cls(
            endpoints=tuple(_endpoint(url, host) for host in hosts.split(",")),
            prefix=f"{prefix.strip('/')}/" if prefix.strip("/") else DEFAULT_PREFIX,
            secure=scheme == SECURE,
            user=unquote(user),
            password=options.get("password", ""),
            ca=options.get("ca", ""),
            cert=options.get("cert", ""),
            key=options.get("key", ""),
        )

    @classmethod
    def _of_managed(cls, url: str, rest: str) -> EtcdAddress:
        authority, _, token = rest.partition("/")
        if not authority or "@" in rest or "?" in rest or "/" in token:
            raise ConfigError(
                f"{url}: write managed://HOST[:PORT], with HOST a machine of the job, and nothing "
                "more: its users and certificates follow from the job's key"
            )
        return cls(
            endpoints=tuple(
                _endpoint(url, host, port=_MANAGED_PORT) for host in authority.split(",")
            ),
            secure=True,
            managed=True,
            token=token,
        )

    @property
    def exposed(self) -> bool:
        """True if keys, values and the password travel in clear between machines."""
        hosts = (endpoint.rpartition(":")[0] for endpoint in self.endpoints)
        return not self.secure and not all(is_this_machine(host) for host in hosts)

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"etcd at {','.join(self.endpoints)}"


def _endpoint(url: str, text: str, *, port: int = _DEFAULT_PORT) -> str:
    host, colon, given = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, given = text, str(port)
    if not host or not given.isdecimal() or not 0 < int(given) < 1 << 16:
        raise ConfigError(f"{url}: {text!r} is not HOST:PORT")
    return f"{host}:{given}"
