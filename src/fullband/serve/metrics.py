"""`/metrics`, in Prometheus's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fullband.serve.scheduler import Scheduler

KNOWN = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/fullband/passes", "/health", "/metrics", "/")


class Metrics:
    """What a scheduler did, and how its server answered."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, scheduler: Scheduler):
        self._registry = CollectorRegistry()
        self._answers = Counter("fullband_http_requests", "HTTP requests answered", ["path", "status"], registry=self._registry)
        self._seconds = Histogram("fullband_http_seconds", "time to the answer's first byte", ["path"], registry=self._registry)
        self._registry.register(_Scheduled(scheduler))

    def answered(self, path: str, status: int, seconds: float) -> None:
        named = path if path in KNOWN else "other"
        self._answers.labels(named, str(status)).inc()
        self._seconds.labels(named).observe(seconds)

    def text(self) -> str:
        return generate_latest(self._registry).decode()


class _Scheduled:
    """Counts and lengths of a scheduler, when they are asked for."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler

    def collect(self) -> Iterator[Any]:
        scheduler, counters = self.scheduler, self.scheduler.counters
        yield GaugeMetricFamily("fullband_running_sequences", "sequences in the running batch", scheduler.running)
        yield GaugeMetricFamily("fullband_waiting_requests", "requests that wait for a place", scheduler.waiting)
        yield GaugeMetricFamily("fullband_prefix_bytes", "beginnings of prompts that are kept", scheduler.engine.kept_bytes)
        for name, words in {
            "requests": "requests taken",
            "cancelled": "requests cancelled",
            "prompt_tokens": "tokens of prompts",
            "prefix_hits": "prompts that began as one that was kept",
            "cached_tokens": "tokens of prompts that were not run again",
            "new_tokens": "tokens made",
            "steps": "steps of the running batch",
        }.items():
            yield CounterMetricFamily(f"fullband_{name}", words, getattr(counters, name))
