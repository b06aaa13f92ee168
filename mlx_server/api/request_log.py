"""One line in the log for each generation that has ended or was refused. No text of prompts or answers is in it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_server.api.generation import GenerationJob
from mlx_server.errors import ServeError
from mlx_server.observability.engine_metrics import RequestSummary
from mlx_server.observability.logs import log_event

logger = logging.getLogger("mlx_server.requests")


def log_end(job: GenerationJob, model_name: str, choices: Sequence[RequestSummary]) -> None:
    """A generation has ended, in whatever way. Tokens are summed over its choices; times are those of the choice
    that came first, and `tpot_ms` is the mean over all tokens after a choice's first."""
    decoded = [choice for choice in choices if choice.tpot_s is not None]
    num_later_tokens = sum(choice.num_output_tokens - 1 for choice in decoded)
    decode_s = sum((choice.tpot_s or 0.0) * (choice.num_output_tokens - 1) for choice in decoded)
    fields = {
        **_identity(job, model_name, choices[0].tier),
        "choices": len(choices),
        "prompt_tokens": sum(choice.num_prompt_tokens for choice in choices),
        "cached_tokens": sum(choice.num_cached_tokens for choice in choices),
        "output_tokens": sum(choice.num_output_tokens for choice in choices),
        "queue_ms": _ms(_least(choice.queue_s for choice in choices)),
        "ttft_ms": _ms(_least(choice.ttft_s for choice in choices)),
        "tpot_ms": _ms(decode_s / num_later_tokens if num_later_tokens else None),
        "finish_reason": ",".join(sorted({choice.finish_reason.value for choice in choices})),
    }
    log_event(logger, "request ended", fields)


def log_refusal(job: GenerationJob, model_name: str, error: ServeError) -> None:
    """A generation was refused; its error's name stands for the reason."""
    fields = {
        **_identity(job, model_name, job.caller.tier.name),
        "choices": job.n * len(job.prompts),
        "prompt_tokens": job.n * sum(len(prompt.token_ids) for prompt in job.prompts),
        "error": type(error).__name__,
    }
    log_event(logger, "request refused", fields)


def _identity(job: GenerationJob, model_name: str, tier: str) -> dict[str, Any]:
    return {"request_id": job.request_id, "key": job.caller.identity, "model": model_name, "tier": tier}


def _least(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(1000.0 * time_s, 3)
