"""The native library: this package's own MLX operations for the CPU, built against the installed MLX.

`nodes.cpp` lists its functions. It is a Python extension that shares MLX's types, so it is built with nanobind, whose
internals must be the same as in MLX's build. If they are not, or something for the build is missing, the library is
None and MLX's own operations are used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
import sysconfig
import threading
from functools import lru_cache
from importlib import metadata
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx

from mlx_server import config
from mlx_server.environment import is_mac
from mlx_server.errors import ConfigError
from mlx_server.runtime.kernels.cpu.build import NativeBuildError, Unit, build, usable_cpus

logger = logging.getLogger(__name__)

MAX_DEFAULT_THREADS = 16
THREADS_VARIABLE = "MLX_SERVE_CPU_THREADS"
DEPTH_STEP = 32
"""The depth of a product must be a multiple of this."""

_MODULE = "mlx_server_native"
_HERE = Path(__file__).parent
_BINDING_FLAGS = ("-O1", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG", "-DNB_DOMAIN=mlx")
_lock = threading.Lock()
_engines: WeakValueDictionary[int, Any] = WeakValueDictionary()


def library() -> Any | None:
    """The library, compiled on the first call in a new home folder, which takes some seconds. None, after a warning, if
    it cannot be built or loaded. Any thread."""
    with _lock:
        found = _found()
    return None if isinstance(found, NativeBuildError) else found


def why_missing() -> str | None:
    """Why `library` is None, in one line; None if there is a library. May compile it."""
    with _lock:
        found = _found()
    return str(found) if isinstance(found, NativeBuildError) else None


def prepare(wait_s: float = 0.0) -> bool:
    """Builds the library on a background thread if MLX computes on the CPU. Returns whether it is still being built
    after `wait_s`."""
    if mx.default_device() != mx.cpu:
        return False
    builder = threading.Thread(target=library, name="native-build", daemon=True)
    builder.start()
    builder.join(wait_s)
    return builder.is_alive()


@lru_cache(maxsize=1)
def _found() -> Any:
    """The library, or the error that says why there is none."""
    try:
        return load(config.home() / "kernels")
    except NativeBuildError as error:
        logger.warning(
            "The native CPU operations are not used, so products and attention are MLX's own and take longer: %s.",
            error,
        )
        return error


def load(folder: Path) -> Any:
    """The library in `folder`; builds it there first if it is missing. Raises `NativeBuildError`."""
    try:
        import nanobind
    except ImportError as error:
        raise NativeBuildError("the package nanobind is not installed") from error
    binding = Path(nanobind.include_dir()).parent
    mlx = _mlx_folder()
    headers = (binding / "include", binding / "ext" / "robin_map" / "include", mlx / "include", _python_headers())
    includes = tuple(f"-I{path}" for path in headers)
    units = [  # those that take longest first
        Unit(_HERE / "nodes.cpp", (*_BINDING_FLAGS, "-std=c++20", f"-DNATIVE_MODULE={_MODULE}", *includes)),
        Unit(_HERE / "products.cpp"),
        Unit(_HERE / "attention.cpp"),
        Unit(binding / "src" / "nb_combined.cpp", (*_BINDING_FLAGS, "-Og", *includes)),  # as fast, sooner compiled
        Unit(_HERE / "layer.cpp", ("-O3", "-ffp-contract=off")),
    ]
    link = [f"-L{mlx / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx / 'lib'}"]
    if is_mac():
        link += ["-undefined", "dynamic_lookup"]
    versions = [_digest_of_mlx(mlx), metadata.version("nanobind"), str(sysconfig.get_config_var("SOABI"))]
    return _import(build(_MODULE, units, folder, link=link, versions=versions))


def _mlx_folder() -> Path:
    spec = importlib.util.find_spec("mlx.core")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    if not (folder / "include" / "mlx" / "mlx.h").is_file():
        raise NativeBuildError("the installed MLX brings no headers")
    return folder


def _digest_of_mlx(folder: Path) -> str:
    """Of libmlx itself: a build from source may have the same version as another."""
    library = next((folder / "lib").glob("libmlx.*"), None)
    if library is None:
        raise NativeBuildError(f"there is no libmlx in {folder / 'lib'}")
    with library.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _python_headers() -> Path:
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        hint = "" if is_mac() else "; the package `python3-dev` brings them"
        raise NativeBuildError(f"this Python has no headers in {folder}{hint}")
    return folder


def _import(path: Path) -> Any:
    """Loads the extension and passes an array to it: with other nanobind internals it does not know MLX's type."""
    spec = importlib.util.spec_from_loader(_MODULE, ExtensionFileLoader(_MODULE, str(path)))
    assert spec is not None
    try:
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        one = mx.array([[1.0]])
        module.linear(module.Engine(1), one, one)
    except (ImportError, TypeError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise NativeBuildError(f"{path.name} does not fit MLX {metadata.version('mlx')}: {reason}") from error
    sys.modules[_MODULE] = module
    return module


def engine(threads: int) -> Any:
    """An engine with that many threads, shared by all callers that ask for as many; freed with the last reference."""
    found = _engines.get(threads)
    if found is None:
        native = library()
        assert native is not None
        found = _engines[threads] = native.Engine(threads)
    return found


def swiglu(gate: mx.array, up: mx.array) -> mx.array | None:
    """SwiGLU on any engine that a model keeps alive; None to leave it to MLX."""
    found = next(iter(_engines.values()), None) if gate.dtype == mx.float32 else None
    y: mx.array | None = None if found is None else sys.modules[_MODULE].swiglu(found, gate, up)
    return y


def default_threads() -> int:
    """`MLX_SERVE_CPU_THREADS`, else the CPUs that this process may use, 16 at most. Raises `ConfigError`."""
    configured = os.environ.get(THREADS_VARIABLE)
    if configured is not None:
        if not configured.isdecimal() or int(configured) < 1:
            raise ConfigError(f"{THREADS_VARIABLE} is {configured!r}; it must be a whole number from 1.")
        return int(configured)
    return min(usable_cpus(), MAX_DEFAULT_THREADS)
