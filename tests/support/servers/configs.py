"""Pieces of a configuration file."""

from __future__ import annotations

OPEN = "[server]\nlisten = '0.0.0.0:1'\n"
EVALUATOR = """
[[evaluator]]
evaluator_id = "math"
handler = "agents.math:MathAgent"
resource = { concurrency = 8 }
"""
PYTHON = """
[[dataset]]
name = "made"
task_type = "math"
kind = "python"
"""
DATASET = """
[[dataset]]
name = "gsm8k"
task_type = "math"
path = "gsm8k.jsonl"
"""
