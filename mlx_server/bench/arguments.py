"""Types of command line arguments: numbers within bounds, and addresses."""

from __future__ import annotations

import argparse


def above_0(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def from_0(text: str) -> int:
    """A whole number, at least 0."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return int(text)


def from_1(text: str) -> int:
    """A whole number, at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def server_url(text: str) -> str:
    """A server's address, as clients are given it: with `/v1` or without."""
    url = text.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} is no address; write one like http://127.0.0.1:8000")
    return url
