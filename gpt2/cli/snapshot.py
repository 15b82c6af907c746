"""`snapshot FILE`: what somebody's memory snapshot says, and what it would be on another card."""

from __future__ import annotations

import argparse
import json

from gpt2.cli import options, tables
from gpt2.cli.options import UserError, refusing


def add_options(parser: argparse.ArgumentParser) -> None:
    """The file; --gpu, --alloc-conf or --limit-mib ask what would have been."""
    parser.add_argument("file", help="what torch.cuda.memory._dump_snapshot wrote, or a trace of ours (.json.gz)")
    parser.add_argument("--device", type=options.whole, metavar="N", help="which of its devices (default: the first)")
    options.add_card(parser)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(arguments: argparse.Namespace) -> None:
    """Read, summarise, replay if asked, print."""
    from gpt2.memory import summary

    with refusing():
        trace = load(arguments.file, arguments.device)
        table = summary.summary(trace)
        if arguments.gpu or arguments.alloc_conf is not None or arguments.limit_mib:
            table |= _what_if(trace, arguments)
    print(json.dumps(table, indent=1) if arguments.json else _text(table))


def _what_if(trace, arguments: argparse.Namespace) -> dict:
    """The run on another card or with other settings, and beside it with each setting that could help."""
    from gpt2.memory import gpus
    from gpt2.memory.replay import best_settings, replay

    options.check_limit(arguments.limit_mib)
    if arguments.torch:
        options.note_release(arguments.torch)
    conf, limit = arguments.alloc_conf or "", arguments.limit_mib
    card = {"gpu": gpus.find(arguments.gpu) if arguments.gpu else None, "limit_bytes": limit and limit * 2**20,
            "torch": arguments.torch or options.installed_torch()}
    found = replay(trace, allocator_conf=conf, **card)
    name = card["gpu"].name if card["gpu"] else trace.meta.get("gpu", "")
    return {"what_if": {"gpu": name, "allocator_conf": conf, **found.row()}, "settings": best_settings(trace, **card)}


def _text(table: dict) -> str:
    from gpt2.memory import summary

    lines = [summary.text(table)]
    if "what_if" in table:
        lines += ["", f"What if, on {table['what_if']['gpu'] or 'the same card'}"]
        lines += [_row(table["what_if"], "asked: "), *(f"  note: {note}" for note in table["what_if"]["notes"])]
        lines += ["", "With each setting, the most helpful first", *(_row(row, "") for row in table["settings"])]
    return "\n".join(lines)


def _row(row: dict, prefix: str) -> str:
    fits = "fits" if row["known_to_the_end"] else "fits as far as is known" if row["fits"] else "does not fit"
    allocated, reserved = tables.mib(row["peak_allocated_bytes"]), tables.mib(row["peak_reserved_bytes"])
    what = prefix + (row["allocator_conf"] or "default settings")
    return f"  {allocated:>16} allocated {reserved:>16} reserved  {fits}  {what}"


def load(path: str, device: int | None):
    """A trace from either kind of file, with owners. ValueError or UserError, in one line, if it is neither."""
    from gpt2.memory import snapshot
    from gpt2.memory.ledger import owned
    from gpt2.memory.trace import Trace

    try:
        with open(path, "rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return owned(Trace.load(path)) if gzipped else snapshot.to_trace(snapshot.read(path), device)
