"""The proxy that the environment puts between this machine and a server."""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from thinwire.files.place import shown


def way(url: str) -> str:
    """Return the end of a sentence on a server that does not answer as it should; empty without a proxy."""
    parts = urlsplit(url)
    host, proxy = parts.hostname or "", getproxies().get(parts.scheme, "")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    name = shown(proxy if "//" in proxy else f"//{proxy}").removeprefix("//")
    variable = f"{parts.scheme}_proxy"
    return f"; the way there is by the proxy {name}, as {variable} says: mend that, or put {host} in no_proxy"
