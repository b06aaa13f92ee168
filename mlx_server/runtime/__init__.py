"""Compute: the only importer of mlx and mlx-lm."""

import platform

import psutil

from mlx_server.runtime.command_buffers import set_limits
from mlx_server.runtime.open_files import keep_limit

keep_limit()
set_limits(psutil.virtual_memory().total, is_metal=platform.system() == "Darwin")  # MLX reads them when it is loaded
