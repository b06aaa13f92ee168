"""Rules that the host compiler cannot check, of Metal and of the dialect shared with CUDA."""

from __future__ import annotations

import re

_FORBIDDEN = (
    (r"\b(?:long\s+)?double\b", "Metal has no double"),
    (r"(?<![\w.])\d+\.\d*(?:[eE][+-]?\d+)?(?![\w.])", "a literal without f is a double"),
    (r"\bstd::", "Metal has no std"),
    (r"\b(?:new|delete|throw|try|catch|goto|virtual|dynamic_cast|typeid|thread_local)\b", "not in Metal"),
    (r"\[[=&]?\]\s*\(", "lambdas need Metal 3.2"),
    (r"\b(?:float|half|bfloat|int|uint)[234]\s*\(", "CUDA has no such constructor; fill elements by index"),
    (r"\bthreadgroup\s+[\w<>]+\s*\*", "no pointers to threadgroup memory in the shared dialect"),
)

_POINTER = re.compile(
    r"(?P<before>[^;{}()\n]*)\b(?:float|half|int|uint|short|ushort|uchar|char|bool|uint32_t|T|P|OT|ST|\w+Chunk|Four)"
    r"(?:\s+const)?\s*\*\s*(?:\w+\s*=|\))"
)
_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b")
_CAST_AWAY_CONST = re.compile(r"\(\s*device\s+\w+\s*\*\s*\)\s*(\w+)")


def lint(source: str, written_inputs: tuple[str, ...] = ()) -> list[str]:
    """The violations in a kernel's body, as texts. `written_inputs` are the inputs that it may cast from const."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    findings = []
    for pattern, reason in _FORBIDDEN:
        findings += [f"{reason}: {_line(code, found.start())}" for found in re.finditer(pattern, code)]
    for found in _POINTER.finditer(code):
        if not _SPACE.search(found.group(0)):
            findings.append(f"pointer without an address space: {_line(code, found.start('before') + 1)}")
    for found in _CAST_AWAY_CONST.finditer(code):
        if found.group(1) not in written_inputs:
            findings.append(f"casts away const: {_line(code, found.start())}")
    return findings


def _line(code: str, at: int) -> str:
    end = code.find("\n", at)
    return code[code.rfind("\n", 0, at) + 1 : end if end >= 0 else len(code)].strip()
