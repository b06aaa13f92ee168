"""Chats with images from scripts: the same prompts, and so the same answers, as over HTTP."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.errors import InvalidRequestError
from tests.api.answers.test_images_real import CAT, DOG, NUM_TOKENS, Seer, image, write_folder
from tests.picture_worlds import QWEN

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
WHAT = {"type": "text", "text": "What is this?"}

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # transformers'


def test_a_chat_sees_what_mlx_vlm_sees(tmp_path: Path) -> None:
    folder = tmp_path / "seer"
    vlm = write_folder(folder, QWEN)
    seer = Seer(vlm, folder, None)  # type: ignore[arg-type]
    (tmp_path / "cat.png").write_bytes(CAT)
    given = (CAT, memoryview(CAT), tmp_path / "cat.png", PIL.Image.open(io.BytesIO(CAT)))
    forms = [image(CAT), *({"type": "image", "image": form} for form in given)]
    chats = [[{"role": "user", "content": [form, WHAT]}] for form in (*forms, image(DOG))]
    chats.append([{"role": "user", "content": [image(CAT), image(DOG), WHAT]}])
    shown = [[CAT], [CAT], [CAT], [CAT], [CAT], [DOG], [CAT, DOG]]
    with LLM(str(folder), num_kv_blocks=64) as llm:
        answers = llm.chat(chats, GREEDY, use_tqdm=False)
        for answer, pictures in zip(answers, shown, strict=True):
            assert list(answer.token_ids) == seer.plain(list(answer.prompt_token_ids), *pictures)
        assert answers[0].token_ids != answers[5].token_ids
        assert llm.stats().num_images_encoded == 2
        for source, expected in (
            ("https://cats.example/cat.png", "is at a URL"),
            ("file:///etc/hosts", "is at a URL"),
            ("data:image/png;base64,AAAA", "cannot be decoded"),
        ):
            with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.content\[0\] is an image that {expected}"):
                llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": source}}]}], GREEDY)
        (tmp_path / "empty.png").write_bytes(b"")
        cut, closed = (PIL.Image.open(io.BytesIO(data)) for data in (CAT[:-200], CAT))
        closed.close()
        for given, expected in (
            (tmp_path / "none.png", r": .*none\.png cannot be read"),
            (tmp_path / "empty.png", r" is an image that has 0 bytes \(.*empty\.png\)"),
            (b"", " is an image that has 0 bytes"),
            (io.BytesIO(CAT), r" is an image that is of type BytesIO\. Give the bytes of a file, a pathlib\.Path"),
            (np.zeros((8, 8, 3), np.uint8), " is an image that is of type ndarray"),
            (cut, " is an image that cannot be read"),
            (closed, " is an image that cannot be read"),
        ):
            with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[1\]" + expected) as caught:
                llm.chat([{"role": "user", "content": [WHAT, {"type": "image", "image": given}]}], GREEDY)
            assert caught.value.param == "messages[0].content[1]"
