"""Which Host and Origin headers a server on this machine answers, so that no web page can use it.

A page of another origin can send requests to a server on the reader's machine, and read the answers
where its own name was rebound to 127.0.0.1. Browsers name the page in these two headers.
"""

import re
from collections.abc import Collection

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")  # to listen on
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9._-]{1,253}))(?::([0-9]{1,5}))?")


def refusal(
    host: str | None, origin: str | None, names: Collection[str] = ()
) -> tuple[int, str] | None:
    """Return the status and the reason to refuse a request, or None if it may be answered.

    `host` and `origin` are headers; `names` those of the server besides the loopback ones. One of
    EVERY_ADDRESS stands for all addresses: a number cannot be rebound.
    """
    name = _name(host or "")
    if name is None:
        return 400, "the Host header is missing or malformed"
    is_address = ":" in name or name.replace(".", "").isdigit()
    if name not in (*LOOPBACK, *names) and not (is_address and {*names} & {*EVERY_ADDRESS}):
        return 421, "the Host header names another server; start this one with --allow-host NAME"
    if origin is None:
        return None
    scheme, _, netloc = origin.lower().partition("://")
    same = netloc == (host or "").lower() or _name(netloc) in names
    if scheme not in ("http", "https") or not same:
        return 403, "a page of another origin may not use this service"
    return None


def _name(netloc: str) -> str | None:
    """The name or address in HOST[:PORT], in lower case; None if it is malformed."""
    found = _HOST.fullmatch(netloc.lower())
    return (found[1] or found[2]) if found else None
