"""docs/reference.md: every name that it leads to exists, and every name that people look for is in it."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from py_scheduler.cli import _parser
from py_scheduler.knobs import CONFIG, KNOBS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference.md"
LOOKED_FOR = """
    TaskScheduler TaskScheduler.run_all TaskScheduler.execute_rollout TaskScheduler.execute_eval on_task_done
    SchedulerRolloutManager MultiDataSource _eval_dataset_name Task Batch BatchingStrategy fifo_batching _resolve_spec
    _resolve_stopping _build_sampling_params StoppingCriteria Resource NodeResource PlacementToken PlacementPool
    PlacementPool.try_acquire_batch PlacementPool.max_tokens_for _NodePool.try_allocate _build_placement_pool BaseAgent
    DAggerSWEAgent AgentResult EvaluatorSpec EvaluatorSpec.resource EvaluatorSpec.run_resource
    EvaluatorSpec.eval_resource EvaluatorSpec.sample_resource EvaluatorSpec.batch_size EvaluatorSpec.default_stopping
    Evaluator Evaluator.run _execute_sample _populate_token_data _termination_reason _termination_reason_agent
    _annotate_abort classify_abort classify_termination DAggerSchedule metadata["_dataset_cfg"] termination_summary.py
    evaluator_factory.py evaluator_config_dagger.py rollout_manager.py ENV_REFERENCE.md trajectory_sft_samples.pt
    Scheduler Scheduler.schedule Scheduler.get_payload_results Scheduler.get_statuses Scheduler.start Scheduler.stop
    Scheduler.drain_batch_payload_results Scheduler.discard_completed_results Scheduler.abort_batch Scheduler.has_step
    Scheduler.dynamic_timeout Scheduler.task_done_callback Scheduler.get_key_state Scheduler.get_runner_state
    Scheduler.get_all_state Scheduler.print_all_state TaskWrapper RunningTaskState CompletedTaskResult RunnerWrapper
    RunnerWrapper.run_with_retry sort_batch_id
"""


def rows() -> list[tuple[str, str, str]]:
    """The cells of every row of every table."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| looked for"):
            first, here, differs = line.strip("|").split(" | ")
            found.append((first.strip(), here.strip(), differs.strip()))
    return found


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolve(dotted: str) -> Any:
    """What a dotted name below the package stands for. Raises AttributeError, ModuleNotFoundError."""
    parts = dotted.split(".")
    module, depth = importlib.import_module("py_scheduler"), 0
    for number in range(1, len(parts) + 1):
        try:
            module, depth = importlib.import_module(f"py_scheduler.{'.'.join(parts[:number])}"), number
        except ModuleNotFoundError:
            break
    found: Any = module
    for part in parts[depth:]:
        names = msgspec.structs.fields(found) if isinstance(found, type) and issubclass(found, msgspec.Struct) else ()
        found = part if part in {field.name for field in names} else _attribute(found, part)
    return found


def _attribute(found: Any, name: str) -> Any:
    """An attribute, or one that the constructor sets."""
    if isinstance(found, type) and not hasattr(found, name) and f"self.{name} = " in _source(found):
        return name
    return getattr(found, name)


def _source(found: type) -> str:
    module = importlib.import_module(found.__module__)
    return Path(str(module.__file__)).read_text(encoding="utf-8")


TARGETS = [name for _, here, _ in rows() for name in quoted(re.sub(r"\[[^\]]*\]\([^)]*\)", "", here))]


@pytest.mark.parametrize("dotted", sorted({*TARGETS, "knobs.KNOBS"}))
def test_every_target_exists(dotted: str) -> None:
    assert resolve(dotted) is not None


def test_what_does_not_exist_would_be_noticed() -> None:
    for dotted in ("placement.PlacementPol", "placment.PlacementPool", "domain.task.Task.promt"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(dotted)


def test_every_row_leads_somewhere_and_says_what_differs() -> None:
    assert len(rows()) > 60
    for first, here, differs in rows():
        assert first
        assert quoted(here)
        assert differs


def test_every_name_of_the_source_is_looked_up_here() -> None:
    names = {name for first, _, _ in rows() for name in quoted(first)}
    assert set(LOOKED_FOR.split()) <= names
    assert {knob.name for knob in KNOBS if knob.name.startswith("STACX_")} <= names
    flags = {knob.flag for knob in (CONFIG, *KNOBS) if knob.flag}
    assert {"--env-cluster-layout", "--save-eval-details"} <= flags & names


def test_every_link_of_the_docs_and_the_readme_leads_to_a_file() -> None:
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_code_of_the_readme_is_whole_and_imports_what_there_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        # Every name that a block uses it imports or makes, and uses what it imports.
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--quiet", "-"]
        checked = subprocess.run(ruff, input=block, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
    for name in ("app.in_process", "domain.steps.StepReport", "client.SchedulerClient.execute_rollout"):
        assert resolve(name)


def test_every_command_of_the_readme_is_one() -> None:
    (commands,) = (action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    for page in ("README.md", "docs/training_loop.md"):
        named = re.findall(r"py-scheduler ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8"))
        assert set(named) <= set(commands), page
