"""`fit`: the largest batch or length that fits, and what runs out beyond it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from gpt2.cli import options, tables
from gpt2.cli.predict import advice, described, one_line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of predict; --batch or --length says where the search begins."""
    parser.add_argument("--what", default="batch", metavar="WHAT", help="batch (default) or length")
    options.add_card(parser)
    options.add_recipe(parser)
    options.add_steps(parser, f"steps that a run must survive (default {options.DEFAULT_STEPS}; 20 with expandable "
                              "segments, where a batch may fit for a few steps only)")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> None:
    """Search and print."""
    what = arguments.what
    if what not in ("batch", "length"):
        raise options.UserError(f"--what {what!r} is not one of: batch, length")
    gpu = options.card(arguments)
    experiment = options.experiment(arguments)
    from gpt2.study import fit

    with one_line(experiment):
        steps = arguments.steps or fit.enough_steps(experiment, arguments.torch)
        search = fit.largest(experiment, gpu, what, arguments.torch, steps)
    found = {"kind": "predicted", "gpu": gpu.name, "torch": arguments.torch or options.installed_torch(),
             "recipe": asdict(experiment.recipe), **options.asked(experiment, steps), **fit.as_json(search, what)}
    if arguments.advise and search.next:
        found["advice"] = advice(fit.with_(experiment, **{what: search.next.number}), gpu, arguments)
    print(json.dumps(found, indent=1) if arguments.json else _text(found, experiment, what))


def _text(found: dict, experiment, what: str) -> str:
    best, after = found[f"largest_{what}"], found["next"]
    conf = f", {experiment.alloc_conf}" if experiment.alloc_conf else ""
    limit = f", limit {experiment.limit_mib:,} MiB" if experiment.limit_mib else ""
    lines = [f"predicted for {found['gpu']}, torch {found['torch']}{limit}{conf}: {described(experiment)}"]
    lines.append(f"largest {what}: {best:,}" if best else f"not even {what} 1 fits")
    if after:
        lines.append(f"{what} {after[what]:,} runs out at {tables.request(after)}")
    else:
        lines.append("the model's context is the end" if what == "length" else
                     f"and more may fit: the search ends where a step has {best * experiment.recipe.length:,} tokens")
    lines += ["", f"  {what:<10}{'':<6}{'peak allocated':>18}{'peak reserved':>18}{'steps':>8}"]
    for row in sorted(found["tried"], key=lambda row: row[what]):
        peaks = f"{tables.mib(row['peak_allocated_bytes']):>18}{tables.mib(row['peak_reserved_bytes']):>18}"
        lines.append(f"  {row[what]:<10}{'fits' if row['fits'] else 'fails':<6}{peaks}{row['steps']:>8}")
    return "\n".join([*lines, *tables.advice_lines(found.get("advice"), f"{what} {after[what]:,}" if after else "")])
