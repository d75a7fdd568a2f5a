"""Numbers of a service in Prometheus' text format. They name no client and no model, as every client may read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skyrl.training_service.service import ServiceStatus

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of Prometheus' text format."""

_PREFIX = "skyrl_training_"


def prometheus_text(status: ServiceStatus) -> str:
    """All numbers of a status."""
    gauges = {
        "models": ("Models that are loaded.", len(status.models)),
        "clients": ("Clients with an open session.", len(status.clients)),
        "sessions": ("Open sessions.", status.sessions),
        "published_snapshots": ("Snapshots that the engines hold.", status.samplers),
        "samples_running": ("Sampling requests that the engines work on.", status.samples_running),
        "samples_waiting": ("Sampling requests that wait for an engine.", status.samples_waiting),
        "requests_waiting": ("Requests of models that are not finished.", status.requests_waiting),
        "tokens_in_flight": ("Tokens in unfinished requests.", sum(client.tokens for client in status.clients)),
        "checkpoint_bytes": ("Bytes of checkpoints.", sum(client.checkpoint_bytes for client in status.clients)),
    }
    lines: list[str] = []
    for name, (meaning, value) in gauges.items():
        lines += _metric(name, "gauge", meaning, {"": value})
    kinds = {f'{{kind="{kind}"}}': count for kind, count in sorted(status.finished.items())}
    lines += _metric("requests_total", "counter", "Finished requests by kind, since the start of the service.", kinds)
    lines += _metric(
        "tokens_total", "counter", "Tokens of finished requests, since the start of the service.", {"": status.tokens}
    )
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, meaning: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {meaning}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    for labels, value in values.items():
        yield f"{_PREFIX}{name}{labels} {value}"
