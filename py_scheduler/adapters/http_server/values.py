"""Values in what an inference server answers.

Invariant: nothing a server says is used before it was read as one of these: ids and log-probs fit the arrays of a
trajectory.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from py_scheduler.domain.generation import FinishReason, Generation
from py_scheduler.domain.limits import MAX_NAME_LENGTH

_MAX_FLOAT32 = 3.4028234663852886e38

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
LogProb = Annotated[float, msgspec.Meta(ge=-_MAX_FLOAT32, le=_MAX_FLOAT32)]
Version = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]

BAD_REQUEST, SERVER_ERRORS = 400, 500
NOTHING = Generation(token_id_bytes=b"", log_prob_bytes=b"", text="", finish_reason=FinishReason.ABORT)


class SaidSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) are of that version, as the server says."""

    version: Version
    start: int
    end: int


class Tokenized(msgspec.Struct, frozen=True):
    """What its tokenizer answers."""

    tokens: list[TokenId]
