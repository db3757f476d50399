"""What a scheduler is made of, as it is shown to clients."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.requests import EvaluatorSpecView, GenerationEngineView
from py_scheduler.errors import GenerationError

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import GenerationEngine

logger = logging.getLogger(__name__)

_NO_MODEL_INFO = "the engine does not answer: the server's log says why"


def evaluator_view(spec: EvaluatorSpec) -> EvaluatorSpecView:
    return EvaluatorSpecView(
        evaluator_id=spec.evaluator_id,
        handler=spec.handler.handler_name,
        resource=spec.resource,
        sample_resource=spec.sample_resource,
        batch_size=spec.batch_size,
    )


async def engine_view(role: str, engine: GenerationEngine) -> GenerationEngineView:
    try:
        info = await engine.model_info()
    except GenerationError as error:
        # Its text holds addresses that are none of a client's business; the log has it.
        logger.warning("the engine in role %s does not say what it serves: %s", role, error)
        return GenerationEngineView(
            role=role, model_name="", weight_version="", vocab_size=0, context_length=0, error=_NO_MODEL_INFO
        )
    return GenerationEngineView(
        role=role,
        model_name=info.name,
        weight_version=info.weight_version,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
    )
