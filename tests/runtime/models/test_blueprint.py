"""Models described before they are loaded, which happens on any thread."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import psutil

from mlx_server.runtime.models.blueprint import predict_cache
from tests.tiny_models import tiny_model

ENDS_AT_ONCE = """
import threading, time
import mlx.core as mx
from mlx_server.runtime.models import blueprint

class SlowToEnd:
    def __del__(self):
        time.sleep(0.2)

slow = SlowToEnd()
plus_one = mx.compile(lambda x: {"sum": x + 1})
discover = blueprint.discover_layers

def discover_much(model):
    for size in range(1, 3000):  # what compiled functions leave takes some milliseconds to free
        plus_one(mx.zeros((size,)))
    return discover(model)

blueprint.discover_layers = discover_much
config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
          "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 32}
thread = threading.Thread(target=lambda: blueprint.predict_cache(config, "float32"))
thread.start()
thread.join()
"""


def test_a_process_may_end_right_after_a_worker_thread_has_described_a_model() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_description_leaves_no_thread_behind() -> None:
    """On a CPU, MLX starts a thread for each stream that there is when it clears its caches, and ends none. The last of
    the descriptions' own threads may still be ending when threads are counted."""
    config = dict(tiny_model("llama").config)

    def num_threads() -> int:
        for _ in range(20):
            predict_cache(config, "float32")
        mx.clear_cache()
        return psutil.Process().num_threads()

    with ThreadPoolExecutor(1) as worker:  # as the server's: not the thread in which models are computed
        before, after = (worker.submit(num_threads).result() for _ in range(2))
    assert after - before < 5
