"""A rollout scheduler for RL post-training of language models: see README.md.

    from py_scheduler import SchedulerClient, Task, TaskConfig

Every name that a user needs is here, and docs/python_api.md says what each is. None is loaded before it is asked for:
a client never loads the server, a handler never loads gRPC. Frameworks are plugged in by `py_scheduler.integrations`,
and Trinity's Scheduler has a face of its own, `py_scheduler.interfaces.trinity`. Other modules may move in any release.
"""

from __future__ import annotations

_MODULES = {
    "app": "in_process",
    "app.ray_manager": "SchedulerRolloutManager rollout_manager_actor",
    "client": (
        "BlockingGenerationClient BlockingHeldLease BlockingPlacementClient BlockingSchedulerClient ClientTls "
        "GenerationClient HeldLease PlacementClient RolloutEvent SchedulerClient StepEvent Submission"
    ),
    "config": "Config load_config parse_config",
    "domain.collecting": "CollectReply TaskResult UnfinishedTask",
    "domain.evaluator": "BaseAgent Episode EvaluatorSpec",
    "domain.events": (
        "AbortRequested AttemptEnded AttemptStarted EndpointsSet ResultsAcknowledged ResultsCollected ResultsDiscarded "
        "TaskDone TrainingResumed WeightsChanged"
    ),
    "domain.explanations": "TaskExplanation",
    "domain.generation": (
        "ChatMessage EndpointState EndpointView FinishReason Generation GenerationState PauseMode SamplingParams "
        "StoppingCriteria"
    ),
    "domain.leases": "CapacityView LeaseState LeaseToken LeaseView PlacementView ReleaseReply",
    "domain.requests": (
        "AbortReply Delivery EventKind ServerInfo SubmissionView TasksAcceptedNotice WatchedFrame WatchedRecord"
    ),
    "domain.resources": "NodeResource Resource",
    "domain.results": "AgentResult AttemptState EpisodePhase Outcome Reward SampleDone TaskState Timings",
    "domain.runners.runner": "RunnerState RunnerView",
    "domain.task": "BatchId RetryPolicy Sample Task TaskConfig",
    "domain.training.data": "DataSource",
    "domain.training.iteration": "IterationContext",
    "domain.training.samples": "SampleStatus TrainingSample",
    "domain.training.steps": "StepKind StepReport StepRequest",
    "domain.trajectory": "Trajectory Turn",
    "errors": (
        "AlreadyExistsError ClusterLayoutError ConfigError ContextOverflowError CursorExpiredError "
        "CursorMismatchError EngineRejectedError EngineUnavailableError FailedPreconditionError FieldViolation "
        "GenerationAbortedError GenerationError InvalidArgumentError JournalDamagedError JournalError "
        "LeaseError ModelFetchError NotFoundError PermissionDeniedError ResourceExhaustedError RunnerError "
        "RunnerLostError RunnerStartError SandboxError SchedulerError ServerError TurnLimitError "
        "UnauthenticatedError UnplaceableError"
    ),
    "interfaces.step_results": "EvalResult RolloutResult",
    "interfaces.task_scheduler": "TaskScheduler",
    "knobs": "add_flags overrides_of",
    "placement": "Lease PlacementPool PlacementToken",
    "rollout.dagger": "DAggerSchedule Decay",
    "rollout.figures": "RolloutSummary summarise summary_table",
    "rollout.files.trajectories": "Origin write_trajectories",
    "rollout.groups": "Group",
    "rollout.sources.iterable": "IterableSource",
    "rollout.sources.mixture": "MultiDataSource WeightedSource",
    "simulation.figures": "SimulationFigures",
    "simulation.simulate": "LostNode SimulationRun SimulationSettings simulate",
    "simulation.traces": "read_trace",
    "simulation.workload": "DrawnWorkload DurationDistribution SimulatedStep SimulatedTask",
}
"""The names of each module below this package."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 -- the stub has the names one by one


def __getattr__(name: str) -> object:
    """Loads a name when it is first asked for."""
    from importlib import import_module  # noqa: PLC0415 - as late as the rest

    if name not in _MODULE_OF:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
