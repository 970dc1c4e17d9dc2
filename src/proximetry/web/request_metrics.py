"""`RequestMetrics`: counters of the server, in the text format of Prometheus."""

from collections import Counter, defaultdict
from collections.abc import Mapping

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # buckets

Labels = tuple[tuple[str, str], ...]


class RequestMetrics:
    """Counts requests and their duration by route; used by the event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[Labels] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(_SECONDS))
        self._count: Counter[str] = Counter()
        self._sum: defaultdict[str, float] = defaultdict(float)

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests[("route", route), ("method", method), ("status", str(status))] += 1
        self._count[route] += 1
        self._sum[route] += seconds
        for index, bound in enumerate(_SECONDS):
            self._buckets[route][index] += seconds <= bound

    def render(self, images: int, reloads: Mapping[str, int]) -> str:
        """Return all metrics as text."""
        lines = [
            "# HELP proximetry_requests_total Requests.",
            "# TYPE proximetry_requests_total counter",
            *(_line("requests_total", labels, count) for labels, count in self._requests.items()),
            "# HELP proximetry_request_seconds Time from a request to the end of its response.",
            "# TYPE proximetry_request_seconds histogram",
        ]
        for route, total in self._count.items():
            label = ("route", route)
            bounds = zip((*map(str, _SECONDS), "+Inf"), (*self._buckets[route], total), strict=True)
            lines += [
                _line("request_seconds_bucket", (label, ("le", bound)), count)
                for bound, count in bounds
            ]
            lines.append(_line("request_seconds_sum", (label,), round(self._sum[route], 6)))
            lines.append(_line("request_seconds_count", (label,), total))
        lines += [
            "# HELP proximetry_gallery_images Images in the gallery.",
            "# TYPE proximetry_gallery_images gauge",
            _line("gallery_images", (), images),
            "# HELP proximetry_reloads_total Changes of the gallery that were loaded, or failed.",
            "# TYPE proximetry_reloads_total counter",
            *(
                _line("reloads_total", (("result", name),), count)
                for name, count in reloads.items()
            ),
        ]
        return "\n".join(lines) + "\n"


def _line(name: str, labels: Labels, value: float) -> str:
    text = ",".join(f'{key}="{value}"' for key, value in labels)
    return f"proximetry_{name}{f'{{{text}}}' if text else ''} {value}"
