"""Every option of a recipe can be typed, does what it says, and has a line of help."""

import argparse
import re
from dataclasses import fields

import pytest

from gpt2.cli import parser
from gpt2.cli.options import experiment
from gpt2.step import Recipe

TYPED = {  # field -> what is typed for it, and what it then is
    "model": ("--model 350M", "350M"), "batch": ("--batch 3", 3), "length": ("--length 77", 77),
    "precision": ("--precision bf16", "bf16"), "attention": ("--attention sdpa", "sdpa"),
    "checkpoint": ("--checkpoint every-3", "every-3"), "loss": ("--loss chunked", "chunked"),
    "optimizer": ("--optimizer fused", "fused"), "accumulate": ("--accumulate 3", 3), "clip": ("--clip 0.5", 0.5),
    "dropout": ("--dropout 0.1", 0.1), "loss_chunks": ("--loss chunked --loss-chunks 64", 64),
    "keep_logits": ("--drop-logits", False), "set_to_none": ("--keep-gradients", False),
    "moments": ("--moments bf16", "bf16"), "step_in_backward": ("--step-in-backward", True),
}
COMMANDS = ("predict", "fit", "record")


def typed(words: str, command: str = "predict"):
    return experiment(parser().parse_args([command, "--gpu", "A40", *words.split()]))


def test_no_option_is_out_of_reach():
    assert set(TYPED) == {field.name for field in fields(Recipe)}


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_typed_is_what_the_recipe_has(name, command):
    words, value = TYPED[name]
    assert getattr(Recipe(), name) != value
    assert getattr(typed(words, command).recipe, name) == value


def test_nothing_typed_is_the_published_baseline():
    found = typed("")
    assert found.recipe == Recipe()
    assert (found.steps, found.backend, found.limit_mib, found.alloc_conf) == (3, "", None, "")


@pytest.mark.parametrize("name", ["auto", "flash", "efficient", "cudnn", "math"])
def test_a_backend_is_forced(name):
    assert typed(f"--attention sdpa --backend {name}").backend == ("" if name == "auto" else name)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_line_of_help(command):
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    chosen = commands.choices[command]
    shown = chosen.format_help()
    for action in chosen._actions:
        assert action.help, action.option_strings
        line = next(line for line in shown.splitlines() if re.match(rf"\s+(-h, )?{action.option_strings[-1]}\b", line))
        assert action.help.split()[0] in line or command == "fit" and "--steps" in line
