"""The configuration of the connection to Google Cloud Storage or Azure. Nothing here needs obstore.

obstore itself reads the variables of the environment: account, credentials, endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.ckpt.store.objects.limits import ObjectLimits

_AZURE_ENDPOINTS: Final = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_GOOGLE_ENDPOINTS: Final = ("GOOGLE_BASE_URL",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One kind of server: its words, and the way it marks a version of an object.

    ``version_key`` is the field of obstore's replies that conditions compare. ``endpoints`` are the
    variables that name another server than the provider's own.
    """

    scheme: str
    container: str
    version_key: str
    endpoints: tuple[str, ...]
    prefixes: tuple[str, ...]
    keys: str
    rights: str
    most_parts: int

    def example(self) -> str:
        """Return how an address is written."""
        return f"{self.scheme}://{self.container}/prefix"


AZURE: Final = Provider(
    scheme="az",
    container="container",
    version_key="e_tag",
    endpoints=_AZURE_ENDPOINTS,
    prefixes=("AZURE_", "AZURITE_"),
    keys=(
        "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the token or identity "
        "that is used instead"
    ),
    rights="give it the role Storage Blob Data Contributor on the container, or use another one",
    most_parts=50_000,
)
GOOGLE: Final = Provider(
    scheme="gs",
    container="bucket",
    version_key="version",
    endpoints=_GOOGLE_ENDPOINTS,
    prefixes=("GOOGLE_",),
    keys="check GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    rights="give it the role Storage Object User on the bucket, or use another one",
    most_parts=10_000,
)
PROVIDERS: Final = {provider.scheme: provider for provider in (AZURE, GOOGLE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig(ObjectLimits):
    """The provider, and the limits of requests.

    ``environment`` are the variables that obstore reads, kept to notice when they change.
    ``settings`` are obstore's own settings by name, and come before the environment. A part must
    arrive within ``stall_s``, since obstore counts the time of a request and not of its bytes.
    """

    provider: Provider
    settings: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    stall_s: float = 60.0

    @staticmethod
    def from_environment(provider: Provider, environment: Mapping[str, str]) -> CloudConfig:
        """Return the configuration of the provider's variables."""
        found = {n: v for n, v in environment.items() if n.startswith(provider.prefixes)}
        return CloudConfig(provider=provider, environment=tuple(sorted(found.items())))

    @property
    def is_plain(self) -> bool:
        """True if the endpoint is named without TLS, as an emulator's is."""
        known = dict(self.environment)
        names = [known.get(name, "") for name in self.provider.endpoints]
        names += [value for name, value in self.settings if name in ("endpoint", "base_url")]
        return any(name.startswith("http://") for name in names)
