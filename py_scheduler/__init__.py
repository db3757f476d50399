"""A rollout scheduler for RL post-training of language models: see README.md.

Clients are in `py_scheduler.client`, handlers derive from `py_scheduler.domain.evaluator.BaseAgent`, placement on its
own is `py_scheduler.placement`.
"""
