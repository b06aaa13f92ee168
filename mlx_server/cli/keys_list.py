"""Shows all keys: what they are for, and what they have used. A server writes usage down every few seconds.

examples:
  mlx-serve keys list
  mlx-serve keys list --json
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time

from mlx_server.api.auth.key_file import KeyRecord
from mlx_server.cli.keys import add_key_flags, open_keys
from mlx_server.cli.settings_flags import config_from
from mlx_server.cli.table import ago, table

_HEADER = ("id", "tier", "created", "last used", "requests", "prompt", "output", "label")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with times in seconds since 1970")
    add_key_flags(parser)


def run(args: argparse.Namespace) -> int:
    with open_keys(config_from(args)) as file:
        records = file.records()
    if args.json:
        print(json.dumps([dataclasses.asdict(record) for record in records], indent=2))
    else:
        print(table([_HEADER, *map(_row, records)], right={4, 5, 6}))
    return 0


def _row(record: KeyRecord) -> tuple[str, ...]:
    counts = (record.num_requests, record.num_prompt_tokens, record.num_output_tokens)
    return (
        record.key_id,
        record.tier,
        _day(record.created_s),
        "never" if record.last_used_s is None else ago(time.time() - record.last_used_s),
        *(f"{count:,}" for count in counts),
        f"REVOKED {record.label}".strip() if record.revoked_s is not None else record.label,
    )


def _day(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d")
