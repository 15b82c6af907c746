"""The second article, claim by claim: what it says, what we find, and whether that is the same.

The claims are data (results/published/05-claims.csv). A finding is computed when it is asked for, from the step counted
or predicted now and from recorded times; its verdict is a comparison, not an opinion.
"""

from __future__ import annotations

from functools import cache

import pandas as pd

from gpt2.study import recorded
from gpt2.study.findings import claims_stream, claims_update
from gpt2.study.findings.claims_judged import GIVEN, HOLDS, OTHERWISE, PARTLY
from gpt2.study.tables import Shown, published

STREAM = ("stream", "phase 0", "phase 1", "phase 2", "allocator", "guidance")
UPDATE = ("phase 3", "phase 4")
FINDINGS = claims_stream.FINDINGS | claims_update.FINDINGS


@cache
def shown(sections: tuple[str, ...]) -> Shown:
    """The claims of these sections of the article, each with our finding."""
    claims = published("05-claims")
    claims = claims[claims["section"].isin(sections)]
    rows = [(row.description, _said(row), *FINDINGS[row.claim]()) for row in claims.itertuples()]
    columns = ["the article's claim", "its number", "what we find", "verdict", "where"]
    facts = recorded.where(recorded.table("05-phases"))
    caption = f"Claims of the second article. Counts and bytes: computed now. Times: {facts[0].lower()}{facts[1:]}"
    return Shown(pd.DataFrame(rows, columns=columns), caption)


def verdicts(sections: tuple[str, ...]) -> str:
    """How many of them hold, in a line."""
    verdict = shown(sections).frame["verdict"]
    words = {HOLDS: "hold", PARTLY: "hold in part", OTHERWISE: "otherwise", GIVEN: "given"}
    counts = [f"{(verdict == name).sum()} {text}" for name, text in words.items() if (verdict == name).any()]
    return f"{len(verdict)} claims: {', '.join(counts)}"


def _said(row) -> str:
    if pd.isna(row.value):
        return ""
    return f"{'about ' if row.kind == 'rough' else ''}{row.value:,.6g} {row.unit}"
