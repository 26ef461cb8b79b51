"""Fixtures: the report of a short stream."""

from typing import Any

import pytest


def row(acc: float, gen: float, bwt: float | None = None, **accuracies: float) -> dict[str, Any]:
    found: dict[str, Any] = {"ACC": acc, "Gen": gen, "H": 2 * acc * gen / (acc + gen), "accuracies": accuracies}
    return found if bwt is None else found | {"BWT": bwt}


def step(number: int, task: str, values: dict[str, Any]) -> dict[str, Any]:
    return values | {"step": number, "task": task, "kept_fraction": 0.5, "fold_seconds": 1.25, "score_seconds": 3.5}


@pytest.fixture
def report() -> dict[str, Any]:
    return {
        "method": {"name": "SAFE-Merge", "settings": {"keep_ratio": 0.5, "lr": 0.001}},
        "tasks": ["mnist", "flags"],
        "controls": ["probe"],
        "references": {
            "pretrained": row(0.2, 0.6, mnist=0.15, flags=0.25, probe=0.6),
            "individual": row(0.95, 0.1, mnist=0.97, flags=0.93, probe=0.1),
        },
        "steps": [
            step(1, "mnist", row(0.9, 0.5, mnist=0.9, probe=0.5)),
            step(2, "flags", row(0.75, 0.4, -0.2, mnist=0.7, flags=0.8, probe=0.4)),
        ],
        "command": "safemerge fit",
        "seconds": 12.5,
        "merged": "0a1b2c",
        "environment": {"python": "3.11", "torch": "2.14"},
    }
