"""OpenAI's `prediction` and a draft model over HTTP: fewer calls of the model, the same answer, and what usage says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlx_server.batching.speculation import draft_burst
from mlx_server.batching.speculation.draft_burst import Burst
from mlx_server.config import Config, SchedulerConfig
from tests.api.real_worlds import RealWorld, started
from tests.api.worlds import Site, World, user
from tests.engine_worlds import make_folder
from tests.tiny_models import byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

LETTERS = byte_tokenizer().convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = make_folder(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:  # whatever it costs
        patch.setattr("mlx_server.batching.speculation.drafting.choose_depths", lambda proposed, *_: dict(proposed))
        patch.setattr(
            draft_burst, "choose_burst", lambda rates, most, *_: Burst(most if rates else 0, frozenset(rates), 1e9)
        )
        async with started(Path(folder), "tiny", draft_model=str(folder)) as served:
            yield served


async def ask(world: RealWorld, salt: str, **more: Any) -> tuple[str, int, int]:
    """A sampled answer of 60 letters; how many drafts were right, and how many were not. Nobody else's output is looked
    up under a salt of its own."""
    body = {"messages": user("Say something."), "max_tokens": 60, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    body |= {"allowed_token_ids": LETTERS, "cache_salt": salt}
    response = await world.http.post("/v1/chat/completions", json={**body, **more})
    assert response.status_code == 200, response.text
    answer = response.json()
    details = answer["usage"]["completion_tokens_details"]
    counts = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    return answer["choices"][0]["message"]["content"], *counts


async def test_a_prediction_that_is_right_saves_calls_and_changes_nothing(site: Site, tiny: Any) -> None:
    world = RealWorld(site, site.serve(*tiny))
    plain, num_accepted, num_rejected = await ask(world, "plain", speculate=False)
    assert (num_accepted, num_rejected) == (0, 0)
    before = world.engine.stats().num_model_calls
    predicted, num_accepted, num_rejected = await ask(world, "right", prediction={"type": "content", "content": plain})
    assert (predicted, num_rejected) == (plain, 0)
    assert num_accepted >= 50
    assert world.engine.stats().num_model_calls - before <= 10
    edited = plain[:30] + "zz" + plain[32:]
    parts = [{"type": "text", "text": text} for text in (edited[:20], edited[20:])]
    predicted, num_accepted, num_rejected = await ask(world, "edited", prediction={"type": "content", "content": parts})
    assert predicted == plain
    assert num_accepted >= 40
    assert num_rejected > 0
    predicted, *_ = await ask(world, "wrong", prediction={"type": "content", "content": "x" * 5000})
    assert predicted == plain


@pytest.mark.parametrize("speculate", ["off", "model"])
async def test_a_prediction_is_not_tokenized_where_nothing_looks_it_up(site: Site, speculate: Any) -> None:
    world = World(site, Config())
    world.engine.config = Config(scheduler=SchedulerConfig(speculate=speculate))
    await world.chat(prediction={"type": "content", "content": "words"})
    assert world.engine.requests[0].prediction_token_ids == ()


async def test_a_draft_model_of_the_same_weights_is_always_right(site: Site, tiny: Any) -> None:
    world = RealWorld(site, site.serve(*tiny))
    plain, *_ = await ask(world, "none", speculate=False, seed=7)
    before = world.engine.stats()
    drafted, num_accepted, _ = await ask(world, "model", seed=7)
    after = world.engine.stats()
    assert drafted == plain
    assert num_accepted > 40
    assert after.num_model_calls - before.num_model_calls < 20
    metrics = (await world.http.get("/metrics")).text
    assert (
        f'spec_decode_num_accepted_tokens_total{{engine="0",model_name="tiny"}} {after.num_accepted_tokens}' in metrics
    )
