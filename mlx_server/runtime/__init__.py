"""Compute: the only importer of mlx and mlx-lm."""

import platform

import psutil

from mlx_server.runtime.machine import keep_file_limit
from mlx_server.runtime.memory import set_limits

keep_file_limit()
set_limits(psutil.virtual_memory().total, is_metal=platform.system() == "Darwin")  # MLX reads them when it is loaded
