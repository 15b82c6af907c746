"""`gpus`: the cards that can be simulated, and where what is known of them comes from."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from gpt2.cli import tables


def add_options(parser: argparse.ArgumentParser) -> None:
    """Output."""
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(arguments: argparse.Namespace) -> None:
    """Print them."""
    from gpt2.memory import gpus

    cards = [gpus.find(name) for name in gpus.names()]
    if arguments.json:
        print(json.dumps([asdict(card) for card in cards], indent=1))
        return
    print(f"{'name':<10}{'device':<26}{'memory':>16}{'free at start':>16}  SMs  capability")
    for card in cards:
        memory, free = tables.mib(card.memory_bytes), tables.mib(card.free_bytes_at_start)
        capability = ".".join(map(str, card.capability))
        print(f"{card.name:<10}{card.device_name:<26}{memory:>16}{free:>16}  {card.sms:>3}  {capability}")
    print()
    for card in cards:
        print(f"{card.name}: {card.source}")
