"""How the command line names a submission."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from py_scheduler.domain.requests import SubmissionSelector

if TYPE_CHECKING:
    import argparse

SUBMISSION_HELP = 'a submission: a step (7), a label ("7/gsm8k"), or the submission_id that the server gave it'
_SUBMISSION_ID = re.compile(r"s[0-9a-f]{16}")


def selector_of(options: argparse.Namespace) -> SubmissionSelector:
    """What `submission` and `namespace` name."""
    text, namespace = options.submission, options.namespace
    if _SUBMISSION_ID.fullmatch(text):
        return SubmissionSelector(submission_id=text, namespace=namespace)
    return SubmissionSelector(batch_id=int(text) if text.isdecimal() else text, namespace=namespace)
