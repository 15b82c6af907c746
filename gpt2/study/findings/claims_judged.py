"""How a claim is judged: what two modules of findings share."""

from __future__ import annotations

from gpt2.study.recorded import one

HOLDS, PARTLY, OTHERWISE, GIVEN = "holds", "in part", "otherwise", "given"  # given: a setting, nothing to test
Finding = tuple[str, str, str]  # what we find, the verdict, where it is shown


def judged(condition: bool, otherwise: str = OTHERWISE) -> str:
    """The verdict of a comparison."""
    return HOLDS if condition else otherwise


def phase_ms(recipe: str, phase: str) -> float:
    """Recorded time of a phase, or of the whole step."""
    return one("05-phases", "time_ms", recipe=recipe, phase=phase)


def added(recipe: str, habit: str) -> float:
    """What a habit adds to a step, as a share of the plain one."""
    plain = one("05-sync-costs", "time_ms", recipe=recipe, habit="plain")
    return one("05-sync-costs", "time_ms", recipe=recipe, habit=habit) / plain - 1
