"""Stores measurements of kernels on this machine, in files of the user's cache folder.

An entry is for one chip and one shape. A file is valid for what it was measured with, such as one version of the
kernels. Entries only change speed, so a file that cannot be used is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx

from mlx_server import config

logger = logging.getLogger(__name__)

_VERSION = 1
_FAULTS = (ValueError, TypeError, LookupError, AttributeError)
"""Raised while reading a file of another format or version."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class StoredChoices(Generic[K, V]):
    """One file of entries by chip and key.

    measured_with  a digest of what is measured; a file with another one is ignored as a whole
    parse          returns an entry's key and value; raises one of `_FAULTS` if it cannot be used
    document       returns the entry for JSON; `chip` is added to it
    remedy         what writes a new file, for the warning that a file is ignored
    """

    name: str
    measured_with: str
    parse: Callable[[Mapping[str, Any]], tuple[K, V]]
    document: Callable[[K, V], dict[str, Any]]
    remedy: str

    @property
    def path(self) -> Path:
        return config.home() / "kernels" / self.name

    def load(self) -> dict[K, V]:
        """Reads this chip's entries. A file that cannot be read, has an invalid entry or was measured with something
        else is ignored as a whole, with a warning."""
        try:
            return self._read().get(chip_name(), {})
        except (OSError, *_FAULTS) as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s is ignored (%s); %s writes it anew.", self.path, reason, self.remedy)
            return {}

    def store(self, values: Mapping[K, V]) -> Path:
        """Stores `values` for this chip. Other entries of the file stay; a file that cannot be used is replaced. Other
        processes see either the old file or the new one. Raises `OSError`."""
        try:
            chips = self._read()
        except _FAULTS:
            chips = {}
        chips.setdefault(chip_name(), {}).update(values)
        entries = [
            {"chip": chip, **self.document(key, value)} for chip, here in chips.items() for key, value in here.items()
        ]
        document = {"version": _VERSION, "kernels": self.measured_with, "choices": entries}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
            whole = Path(folder, self.name)
            whole.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            whole.replace(self.path)
        return self.path

    def _read(self) -> dict[str, dict[K, V]]:
        """All entries by chip; empty if there is no file."""
        chips: dict[str, dict[K, V]] = {}
        if not self.path.exists():
            return chips
        document = json.loads(self.path.read_text(encoding="utf-8"))
        if document["version"] != _VERSION or document["kernels"] != self.measured_with:
            raise ValueError("it was measured with other kernels")
        for entry in document["choices"]:
            key, value = self.parse(entry)
            chips.setdefault(str(entry["chip"]), {})[key] = value
        return chips


def digest(*texts: str) -> str:
    """A hash of texts, to find out whether what was measured has changed since."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def chip_name() -> str:
    """The name of the chip of MLX's default device."""
    return str(mx.device_info().get("device_name", platform.processor()))


def whole_number(value: Any) -> int:
    """Returns `value` if it is a positive whole number; raises `ValueError` otherwise."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a positive whole number")
    return value


def dtype_name(dtype: mx.Dtype) -> str:
    """The name of a type in files and kernel texts, like `bfloat16`."""
    return str(dtype).rpartition(".")[2]
