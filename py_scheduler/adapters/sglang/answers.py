"""What SGLang answers when it is asked for something else than tokens, and the values in its answers.

Invariant: nothing a server says is used before it was read as one of these.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from py_scheduler.domain.limits import MAX_NAME_LENGTH

_MAX_FLOAT32 = 3.4028234663852886e38

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
LogProb = Annotated[float, msgspec.Meta(ge=-_MAX_FLOAT32, le=_MAX_FLOAT32)]
Version = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]


class RankLoad(msgspec.Struct, frozen=True, gc=False):
    num_running_reqs: int
    num_waiting_reqs: int


class Loads(msgspec.Struct, frozen=True):
    """Of /v1/loads."""

    loads: list[RankLoad]


class Tokenized(msgspec.Struct, frozen=True):
    """Of /v1/tokenize."""

    tokens: list[TokenId]


class ServedWeights(msgspec.Struct, frozen=True, gc=False):
    """Of /model_info."""

    weight_version: Version | None = None


class Obeyed(msgspec.Struct, frozen=True, gc=False):
    """Of every control call. Something else that answers 200, such as a proxy, says otherwise."""

    message: str
    success: bool = True
