"""Numbers of a service in Prometheus' text format. They name no client and no model, as every client may read them."""

from __future__ import annotations

from skyrl.training_service.service import ServiceStatus


def prometheus_text(status: ServiceStatus) -> str:
    """All numbers of a status."""
    gauges = {
        "models": len(status.models),
        "sessions": status.sessions,
        "published_snapshots": status.samplers,
        "samples_running": status.samples_running,
        "samples_waiting": status.samples_waiting,
        "requests_waiting": status.requests_waiting,
    }
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE skyrl_training_{name} gauge", f"skyrl_training_{name} {value}"]
    lines.append("# TYPE skyrl_training_requests_total counter")
    lines += [
        f'skyrl_training_requests_total{{kind="{kind}"}} {count}' for kind, count in sorted(status.finished.items())
    ]
    lines += ["# TYPE skyrl_training_tokens_total counter", f"skyrl_training_tokens_total {status.tokens}"]
    return "\n".join(lines) + "\n"
