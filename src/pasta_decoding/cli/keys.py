"""Which key an endpoint that annotates or judges is sent; `serve` demands one of another name."""

from __future__ import annotations

import os
from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from pasta_decoding.cli.console import say
from pasta_decoding.data.endpoint import KEY_VARIABLES, Endpoint

SERVER_KEY = "PASTA_API_KEY"
"""What `pasta serve` demands. It opens a server of one's own, and is nothing to tell strangers."""


UNNAMED = Endpoint("", "")
"""How an endpoint is asked, before it is named."""


def named(endpoint: Endpoint, base_url: str, model: str) -> Endpoint:
    """Return the endpoint at an address, with the key for it."""
    return replace(endpoint, base_url=base_url, model=model, api_key=endpoint_key(base_url))


def endpoint_key(base_url: str) -> str:
    """Return the key for an endpoint: of the first variable that is set, empty if none is.

    The server's key, which once served for both, still goes to an address of this machine, where
    that server may be; nobody else is ever sent it. Both is said.
    """
    for name in KEY_VARIABLES:
        if key := os.environ.get(name):
            return key
    key = os.environ.get(SERVER_KEY, "")
    if not key:
        return ""
    if not _is_this_machine(base_url):
        say(f"{SERVER_KEY} is the key of `pasta serve` and is not sent to {base_url}; {_REMEDY}")
        return ""
    say(f"{base_url} is sent {SERVER_KEY}, the key of `pasta serve`; {_REMEDY}")
    return key


_REMEDY = f"put the endpoint's key into {KEY_VARIABLES[0]}"


def _is_this_machine(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
