"""Captured Metal source as a C++ translation unit over the shim."""

from __future__ import annotations

import re

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\((.*?)\) \{\n", re.DOTALL)
_INSTANCE = re.compile(r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((.*?)\) .*?;\n", re.DOTALL)
_BUFFER = re.compile(r"(.*\*|.*&)\s*(\w+) \[\[buffer\((\d+)\)\]\]")
_ATTRIBUTE = re.compile(r"\w+ (\w+) \[\[(\w+)\]\]")
_SHARED = re.compile(r"^(\s*)threadgroup(\s+[\w<>]+\s+\w+\s*\[[^;]*\]\s*;)", re.MULTILINE)

_PLACES = {
    "thread_position_in_grid": "uint3{at->in_grid.x, at->in_grid.y, at->in_grid.z}",
    "thread_position_in_threadgroup": "uint3{at->in_group.x, at->in_group.y, at->in_group.z}",
    "threadgroup_position_in_grid": "uint3{at->group.x, at->group.y, at->group.z}",
    "threadgroups_per_grid": "uint3{at->num_groups.x, at->num_groups.y, at->num_groups.z}",
    "thread_index_in_simdgroup": "at->lane",
    "simdgroup_index_in_threadgroup": "at->simdgroup",
}

_ENTRY = """
#line 1 "entry"
extern "C" unsigned char __start_threadgroup_memory[] __attribute__((weak));
extern "C" unsigned char __stop_threadgroup_memory[] __attribute__((weak));
extern "C" unsigned char* kernel_threadgroup_memory() { return __start_threadgroup_memory; }
extern "C" unsigned long kernel_threadgroup_bytes() { return __stop_threadgroup_memory - __start_threadgroup_memory; }
extern "C" void kernel_entry(void* const* buffers) {
  const emulator::Place* at = emulator_place();
  (void)at;
"""


def translate(source: str, name: str) -> str:
    """The text of the unit. Errors and faults in the kernel's body have lines of `<name>.msl`.

    There are three edits: `static` for threadgroup arrays, line directives, and a call in place of MLX's explicit
    instantiation.
    """
    signature = _SIGNATURE.search(source)
    instance = _INSTANCE.search(source)
    assert signature is not None, source
    function = instance.group(1) if instance else signature.group(1)
    arguments = ", ".join(_argument(parameter) for parameter in signature.group(2).split(",\n"))
    body = f'{source[: signature.end()]}#line 1 "{name}.msl"\n{source[signature.end() :]}'
    body = _SHARED.sub(r"\1EMULATOR_SHARED threadgroup\2", _INSTANCE.sub("\n", body))
    return f"#include <metal_stdlib>\n{body}{_ENTRY}  {function}({arguments});\n}}\n"


def buffer_names(source: str) -> list[str]:
    """The names of the kernel's buffers, in order."""
    signature = _SIGNATURE.search(source)
    assert signature is not None, source
    found = [_BUFFER.search(parameter) for parameter in signature.group(2).split(",\n")]
    return [buffer.group(2) for buffer in found if buffer is not None]


def _argument(parameter: str) -> str:
    buffer = _BUFFER.search(parameter)
    if buffer is None:
        attribute = _ATTRIBUTE.search(parameter)
        assert attribute is not None, parameter
        return _PLACES[attribute.group(2)]
    kind, _, index = buffer.groups()
    if kind.endswith("&"):
        return f"*({kind[:-1].strip()}*)(buffers[{index}])"
    return f"({kind.strip()})(buffers[{index}])"
