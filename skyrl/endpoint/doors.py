"""The address of an endpoint, and who is answered there."""

from __future__ import annotations

import secrets

from attrs import frozen

TOKEN_VARIABLE = "SKYRL_ENDPOINT_TOKEN"
"""Environment variable with the token of clients."""


@frozen(kw_only=True)
class Doors:
    """Who is answered, besides the agents of the run."""

    token: str | None = None
    """Token of clients; None: any client that reaches the address is answered, whatever key it brings."""

    open_to_clients: bool = True
    """False: only requests of trajectories are answered."""

    def opened_by(self, key: str | None) -> bool:
        """Whether a client with this key is answered."""
        return not self.token or secrets.compare_digest((key or "").encode(), self.token.encode())


@frozen(kw_only=True)
class Address:
    """The address that an endpoint listens on."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""

    doors: Doors = Doors()
