"""The host's side of small vision models: processor files, tokens and chat templates of folders, and pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.vision.seeing import SeeingModel
from tests.text_worlds import make_tokenizer

QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}<start_of_image>"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PIXTRAL_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST]{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for block in message['content'] %}{% if block['type'] == 'text' %}"
    "{{ block['text'] }}{% else %}[IMG]{% endif %}{% endfor %}{% endif %}[/INST]{% else %}"
    "{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class VisionFolder:
    """The relevant parts of a model's folder. `image_token` gets its id with the tokenizer."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    image_token: str
    tokens: tuple[str, ...]
    template: str

    def tokenizer(self) -> Tokenizer:
        return make_tokenizer(special=(self.image_token, *self.tokens), chat_template=self.template)

    def load(self, folder: Path, tokenizer: Tokenizer) -> SeeingModel:
        """The model's image side; its processor file is written to `folder`."""
        (folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        ids = {"image": self.image_token, "boi": "<|image>", "eoi": "<image|>"}
        config = {**self.config, **{f"{name}_token_id": tokenizer.token_to_id(token) for name, token in ids.items()}}
        model = SeeingModel.load(folder, config, tokenizer)
        assert model is not None
        return model


VISION = {"hidden_size": 32, "patch_size": 14}
QWEN = VisionFolder(
    {"model_type": "qwen2_5_vl", "vision_config": VISION},
    {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 784, "max_pixels": 200704, "merge_size": 2},
    "<|image_pad|>",
    ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    QWEN_TEMPLATE,
)
GEMMA = VisionFolder(
    {"model_type": "gemma3", "vision_config": VISION, "mm_tokens_per_image": 4},
    {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, "image_seq_length": 4},
    "<image_soft_token>",
    ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"),
    GEMMA_TEMPLATE,
)
SMOLVLM = VisionFolder(
    {"model_type": "smolvlm", "vision_config": {"image_size": 56, "patch_size": 14}, "scale_factor": 2},
    {
        "image_processor_type": "SmolVLMImageProcessor",
        "max_image_size": {"longest_edge": 56},
        "size": {"longest_edge": 112},
        "do_image_splitting": True,
    },
    "<image>",
    (
        *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
    SMOLVLM_TEMPLATE,
)
PIXTRAL = VisionFolder(
    {"model_type": "mistral3", "vision_config": VISION, "spatial_merge_size": 2},
    {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14}},
    "[IMG]",
    ("[INST]", "[/INST]", "[IMG_BREAK]", "[IMG_END]"),
    PIXTRAL_TEMPLATE,
)
GEMMA_4 = VisionFolder(
    {"model_type": "gemma4", "vision_config": {"hidden_size": 32, "patch_size": 4, "pooling_kernel_size": 3}},
    {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 140},
    "<|image|>",
    ("<start_of_turn>", "<end_of_turn>", "<|image>", "<image|>"),
    GEMMA_TEMPLATE.replace("<start_of_image>", "<|image|>").replace(
        "{{ message['role'] }}", "{{ 'model' if message['role'] == 'assistant' else message['role'] }}"
    ),
)


def _in_qwens_template(image: str) -> str:
    return QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image)


GLM = VisionFolder(
    {"model_type": "glm4v", "vision_config": VISION},
    {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 2 * 784, "longest_edge": 2 * 200704},
        "merge_size": 2,
    },
    "<|image|>",
    ("<|im_start|>", "<|im_end|>", "<|begin_of_image|>", "<|end_of_image|>"),
    _in_qwens_template("<|begin_of_image|><|image|><|end_of_image|>"),
)
KIMI = VisionFolder(
    {"model_type": "kimi_vl", "vision_config": VISION},
    {"in_token_limit": 256, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "pad_input": True},
    "<|media_pad|>",
    ("<|im_start|>", "<|im_end|>", "<|media_start|>", "<|media_content|>", "<|media_end|>"),
    _in_qwens_template("<|media_start|>image<|media_content|><|media_pad|><|media_end|>"),
)
LFM_2 = VisionFolder(
    {"model_type": "lfm2_vl", "vision_config": {"hidden_size": 32, "patch_size": 4}},
    {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16, "use_thumbnail": False},
    "<image>",
    (
        *("<|im_start|>", "<|im_end|>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    ),
    _in_qwens_template("<image>"),
)
INTERN_VL = VisionFolder(
    {
        "model_type": "internvl_chat",
        "vision_config": {"image_size": 56, "patch_size": 14},
        "max_dynamic_patch": 4,
        "downsample_ratio": 0.5,
    },
    {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "size": 56, "crop_size": 56},
    "<IMG_CONTEXT>",
    ("<|im_start|>", "<|im_end|>", "<img>", "</img>"),
    _in_qwens_template("<IMG_CONTEXT>\n"),
)
GEMMA_3N = VisionFolder(
    {"model_type": "gemma3n", "vision_config": {"hidden_size": 32}, "vision_soft_tokens_per_image": 4},
    {"image_processor_type": "SiglipImageProcessorFast", "size": {"height": 64, "width": 64}, "do_normalize": False},
    "<image_soft_token>",
    ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image|>"),
    GEMMA_TEMPLATE.replace("<start_of_image>", "<image_soft_token>"),
)
DEEPSEEK_OCR = VisionFolder(
    {"model_type": "deepseekocr", "vision_config": {"model_type": "vision"}},
    {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "candidate_resolutions": [[1024, 1024]], "patch_size": 16},
    "<image>",
    ("<|grounding|>",),
    "{% for message in messages %}{{ message['content'] }}{% endfor %}",
)
MINICPM = VisionFolder(
    {"model_type": "minicpmv4_6", "vision_config": VISION},
    {"max_slice_nums": 4, "scale_resolution": 112, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "<|image_pad|>",
    (
        *("<|im_start|>", "<|im_end|>", "<image>", "</image>"),
        *("<slice>", "</slice>", "<image_id>", "</image_id>"),
    ),
    _in_qwens_template("<|image_pad|>"),
)
FOLDERS = {
    "qwen": QWEN,
    "gemma": GEMMA,
    "smolvlm": SMOLVLM,
    "pixtral": PIXTRAL,
    "gemma4": GEMMA_4,
    "glm": GLM,
    "kimi": KIMI,
    "lfm2": LFM_2,
    "internvl": INTERN_VL,
    "gemma3n": GEMMA_3N,
    "deepseekocr": DEEPSEEK_OCR,
    "minicpm": MINICPM,
}


def picture(seed: int = 0, size: tuple[int, int] = (56, 84)) -> Image.Image:
    """Random noise, so that no two pictures are equal; `size` is width and height."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
