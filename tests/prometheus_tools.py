"""Prometheus and our series: expressions of our dashboard, names in an expression, and promtool's complaints."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "configs" / "grafana" / "mlx-serve.json"

ACCEPTED_COMPLAINTS = (
    "metric names should not contain ':'",  # vLLM's names have one, and ours follow them
    'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
)
"""promtool's complaints about names that vLLM chose."""

_NAME = re.compile(r"\b(?:vllm:|mlx_serve:|http_|process_)\w+")


def dashboard_expressions(model: str, window: str) -> dict[str, list[str]]:
    """The expressions of our Grafana dashboard by panel, with its variables filled in."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return {
        panel["title"]: [
            target["expr"].replace("$model", model).replace("$__rate_interval", window) for target in panel["targets"]
        ]
        for panel in panels
        if panel["type"] != "row"
    }


def names_in(expression: str) -> set[str]:
    """The series that an expression reads."""
    return set(_NAME.findall(expression))


def complaints(promtool: str, exposition: bytes) -> list[str]:
    """The complaints of `promtool check metrics` about a scrape, except accepted ones. Raises if it cannot be
    parsed."""
    done = subprocess.run([promtool, "check", "metrics"], input=exposition, capture_output=True, check=False)
    lines = (done.stderr + done.stdout).decode().splitlines()
    if done.returncode not in (0, 3):  # 3: complaints only
        raise ValueError("\n".join(lines))
    return [line for line in lines if line and not line.endswith(ACCEPTED_COMPLAINTS)]
