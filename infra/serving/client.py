"""The HTTP client for what is asked of a server beside completions."""

from __future__ import annotations

import httpx


def server_client(api_key: str, timeout: float | httpx.Timeout) -> httpx.AsyncClient:
    """A client that sends the key as a bearer token; its owner closes it.

    A proxy that the environment names is for the outside world; like completions, these requests go past it.

    Args:
        timeout: of each request, in seconds.
    """
    return httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=timeout, trust_env=False)
