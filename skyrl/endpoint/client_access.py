"""The address of an endpoint, and its access control."""

from __future__ import annotations

from attrs import frozen

TOKEN_VARIABLE = "SKYRL_ENDPOINT_TOKEN"
"""Environment variable with the token that clients must send."""


@frozen(kw_only=True)
class ClientAccess:
    """Access rules for clients; agents of the run are always admitted."""

    token: str | None = None
    """Token that clients must send; None: any client that reaches the address is admitted, with any key."""

    open_to_clients: bool = True
    """If False, only requests of trajectories are answered."""


@frozen(kw_only=True)
class Address:
    """The address that an endpoint listens on."""

    host: str = "127.0.0.1"
    port: int = 0
    """Port number; 0 selects a free port."""

    access: ClientAccess = ClientAccess()
