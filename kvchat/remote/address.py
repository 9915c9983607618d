"""Address: where a server is."""

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvchat.core.errors import UsageError
from kvchat.core.text import one_line


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and the key that it wants.

    url      without a path that every interface has, such as /v1; "" where it has a socket only
    key      "" for none; it is sent to this server only and stands in no message or log
    model    the model to ask for, "" for the server's only one
    socket   the path of the socket through which it is reached, "" for the network
    """

    url: str
    key: str = field(default="", repr=False)
    model: str = ""
    socket: str = ""

    @property
    def has_certificate(self) -> bool:
        """Whether the connection is encrypted; else certificates are not even loaded (0.1 s)."""
        return self.url.lower().startswith("https:")

    @property
    def shown(self) -> str:
        """The address for the user, without the user name and password that it may contain."""
        if self.socket:
            return "this machine"
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{host}:{parts.port}" if parts.port else str(host)

    @property
    def is_here(self) -> bool:
        """Whether the server is on this machine."""
        if self.socket:
            return True
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def address_of(url: str, key: str = "", model: str = "") -> Address:
    """Return the address of a server that the user gave; raises UsageError if it is none."""
    import httpx2  # 0.1 s that chats without a server do not pay

    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text.strip())
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018  a bad port is found here
        httpx2.URL(text.strip())  # and here what no host's name can be
    except (ValueError, httpx2.InvalidURL):
        is_good = False
    if not is_good:
        raise UsageError(
            f"--endpoint is {one_line(url, 60)}, but must be an address like http://localhost:8080."
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    return Address(f"{parts.scheme}://{parts.netloc}{path}", key, model)
