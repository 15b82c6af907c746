"""`diff A B`: where two traces part. Exit status 0 either way."""

from __future__ import annotations

import argparse
import json

from gpt2.cli.options import refusing


def add_options(parser: argparse.ArgumentParser) -> None:
    """Two files."""
    parser.add_argument("left", help="a trace, as `simulate --trace` and `make measure` write them")
    parser.add_argument("right", help="another one")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(arguments: argparse.Namespace) -> None:
    """Compare and print."""
    from gpt2.memory.diff import compare
    from gpt2.memory.trace import Trace

    with refusing():
        left, right = Trace.load(arguments.left), Trace.load(arguments.right)
    difference = compare(left, right)
    print(json.dumps(_as_json(difference), indent=1) if arguments.json else difference.text())


def _as_json(difference) -> dict:
    def event(events) -> dict | None:
        here = difference.index is not None and difference.index < len(events)
        return events[difference.index]._asdict() if here else None

    def rows(counts) -> list[dict]:
        return [{"action": action, "bytes": size, "count": count} for (action, size), count in counts.most_common()]

    return {"identical": difference.index is None, "index": difference.index,
            "events": [len(difference.left_events), len(difference.right_events)],
            "left": event(difference.left_events), "right": event(difference.right_events),
            "only_left": rows(difference.only_left), "only_right": rows(difference.only_right)}
