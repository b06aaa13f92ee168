"""Drafters for tests: ones that know the answers and are wrong at chosen places, and random ones in folders."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_server.batching.speculation import draft_burst
from mlx_server.batching.speculation.draft_burst import Burst
from mlx_server.batching.speculation.draft_costs import StepRoom
from mlx_server.engine.library.llm import Completion
from mlx_server.request import Request


class Adversary:
    """Drafts the right tokens with random errors: another token of the answer, or token 1."""

    answers: ClassVar[defaultdict[tuple[int, ...], list[Sequence[int]]]] = defaultdict(list)
    rightness = 0.8
    rng = random.Random(0)

    @classmethod
    def learn(cls, completions: Iterable[Completion]) -> None:
        """Replaces the known answers to these prompts."""
        for done in completions:
            cls.answers.pop(done.prompt_token_ids, None)
        for done in completions:
            cls.answers[done.prompt_token_ids] += [output.token_ids for output in done.outputs]

    def propose(self, request: Request, most: int) -> Sequence[int]:
        said = list(request.output_token_ids)
        for answer in self.answers[tuple(request.prompt_token_ids)]:
            if list(answer[: len(said)]) == said:
                return [self._draft(token_id, answer) for token_id in answer[len(said) :][:most]]
        return ()

    def _draft(self, token_id: int, answer: Sequence[int]) -> int:
        return token_id if self.rng.random() < self.rightness else self.rng.choice((1, *answer))

    def forget(self, request: Request) -> None:
        pass


def always(proposed: Mapping[str, int], rates: object, room: StepRoom, *costs: object) -> dict[str, int]:
    """Replaces `choose_depths`: drafts as many tokens as there is room for, whatever they cost."""
    depths, most = {}, room.most
    for request_id, count in proposed.items():
        depths[request_id] = min(count, most)
        most -= depths[request_id]
    return {request_id: depth for request_id, depth in depths.items() if depth > 0}


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever drafts cost, lookups and draft models draft."""
    monkeypatch.setattr(draft_burst, "choose_burst", _always_burst)
    monkeypatch.setattr("mlx_server.batching.speculation.drafting.choose_depths", lambda proposed, *_: dict(proposed))


def _always_burst(rates: Mapping[str, float], most: int, room: StepRoom, *costs: object, **kind: object) -> Burst:
    names = sorted(rates)[: room.most // most]
    return Burst(most, frozenset(names), 1e9) if names else draft_burst.NO_BURST


def random_weights(model: nn.Module, seed: int) -> dict[str, mx.array]:
    """Of a size with which a drafter's answers vary."""
    keys = iter(mx.random.split(mx.random.key(seed), 200))
    return {
        name: 1.0 + 0.1 * mx.random.normal(array.shape, key=key)
        if array.ndim == 1
        else 0.15 * mx.random.normal(array.shape, key=key)
        for (name, array), key in zip(tree_flatten(model.parameters()), keys)
    }


def save_drafter_folder(path: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    """Without a tokenizer, as they are published."""
    path.mkdir(exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def change_tensor(folder: str, name: str, change: Callable[[mx.array], mx.array | None]) -> None:
    """Changes a tensor in the files of a drafter; None leaves it out."""
    path = str(Path(folder) / "model.safetensors")
    weights = mx.load(path)
    assert isinstance(weights, dict)
    changed = change(weights.pop(name))
    mx.save_safetensors(path, weights if changed is None else {**weights, name: changed})


def quantize(model: nn.Module, kind: type[nn.Module] = nn.Module, mode: str = "affine") -> dict[str, Any]:
    """Quantises the modules of a `kind` that can be; returns the settings for a config.json."""
    settings: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": mode}

    def can_be(_: str, module: Any) -> bool:
        return isinstance(module, kind) and hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, **settings, class_predicate=can_be)
    return settings
