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

from py_scheduler.cli import parsers
from py_scheduler.config import parse_config
from py_scheduler.knobs import CONFIG, KNOBS

ROOT = Path(__file__).parents[3]
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


PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EVALUATOR = '[[evaluator]]\nevaluator_id = "x"\nhandler = "m:C"\nresource = {}\n'


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are made where the pages are shown."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?:|mailto:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")
    ):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_code_of_a_page_is_whole_and_imports_what_there_is(page: Path) -> None:
    for block in blocks_of(page, "python"):
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


def test_there_is_code_on_the_pages() -> None:
    assert sum(len(blocks_of(page, "python")) for page in PAGES) >= 8
    assert sum(len(blocks_of(page, "toml")) for page in PAGES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_configurations_of_a_page_are_read(page: Path) -> None:
    """A block may leave out the evaluator that every configuration needs."""
    for block in blocks_of(page, "toml"):
        config = parse_config(block if "[[evaluator]]" in block else f"{block}\n{EVALUATOR}")
        assert config.evaluator


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_of_a_page_is_one(page: Path) -> None:
    _, commands = parsers()
    code = re.findall(r"```.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"py-scheduler ([a-z-]+)", "\n".join(code))) <= set(commands)


# CONTRIBUTING.md


def table_of_ci() -> list[tuple[str, float, int]]:
    """What, budget and limit of each step, in minutes."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (.+?) \| (\d+) \| (\d+) \| [\d.]* ?\|$", text)
    return [(what, float(budget), int(limit)) for what, budget, limit in rows]


def test_the_limits_of_ci_are_those_that_it_enforces_and_its_budgets_add_up() -> None:
    *steps, (_, whole, limit) = table_of_ci()
    run = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert f"budget_minutes=${{CI_BUDGET_MINUTES:-{limit}}}" in run
    assert limit == whole == 45
    assert sum(budget for _, budget, _ in steps) <= whole
    enforced = re.findall(r'(?m)^step "(.+)" (\d+)$', run)[1:-1]
    assert [limit for _, _, limit in steps] == [int(minutes) for _, minutes in enforced]
    for (what, budget, limit), (name, _) in zip(steps, enforced, strict=True):
        assert budget <= limit, what
        assert {word for word in name.split() if word.startswith("test-")} <= set(re.findall(r"[\w-]+", what)), name
    outside = re.sub(r"(?m)^(within|step) .*$|^#.*$", "", run)
    assert not re.search(r"(?m)^make ", outside), "each has a limit"


def test_every_target_of_the_makefile_that_people_call_is_in_the_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = re.findall(r'@echo "make ([a-z-]+)', (ROOT / "Makefile").read_text(encoding="utf-8"))
    called = {"deny", "package", "msrv", *told} - {"help", "clean"}
    assert {name for name in called if f"`make {name}" not in text} == set()
