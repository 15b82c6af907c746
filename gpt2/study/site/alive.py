"""Widgets of a notebook, alive on a page without a kernel.

A cell that shows a widget is evaluated when the site is made: not the whole notebook, only the assignments that its
call depends on. What comes out becomes a fragment of the page; where that fails, the still of the notebook stays.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache

import pandas as pd

from gpt2.study.interactive import grid, guesses, page
from gpt2.study.interactive.calculator_widget import CalculatorWidget
from gpt2.study.widgets import GuessWidget, WalkWidget

WIDGETS = ("walk", "calculator", "guesses")
SCORES = ("score", "scored")  # tables of the reader's guesses: the page has the reader's own, kept by the browser


def wake(notebook) -> None:
    """Give every cell that ends in one of our widgets the fragment that replaces its still, as `metadata.alive`."""
    before: list[ast.stmt] = []
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
        try:
            statements = ast.parse(cell.source).body
        except SyntaxError:
            continue  # a line of IPython, which no widget needs
        shown = _called(statements[-1]) if statements else ""
        if shown in SCORES:
            cell.metadata.alive = page.guesses_html(guesses.QUESTIONS, guesses.TRUTH)
        elif shown in WIDGETS:
            try:
                cell.metadata.alive = fragment(evaluate(statements[-1].value, [*before, *statements[:-1]]))
            except Exception as error:  # the page still has its picture
                print(f"    cell [{number}] stays a picture: {type(error).__name__}: {error}", file=sys.stderr)
        before += statements


def evaluate(expression: ast.expr, before: list[ast.stmt]):
    """The value of an expression after the imports and assignments among `before` that it depends on."""
    needed, kept = _names(expression, ast.Load), []
    for statement in reversed(before):
        if _binds(statement) & needed:
            kept.append(statement)
            needed |= _names(statement, ast.Load)
    known: dict = {}
    exec(compile(ast.Module(kept[::-1], []), "notebook", "exec"), known)
    return eval(compile(ast.Expression(expression), "notebook", "eval"), known)


def fragment(widget) -> str:
    """A widget as HTML with its own script; TypeError for what is not one of ours."""
    for kind, html in _FRAGMENTS.items():
        if isinstance(widget, kind):
            return html(widget)
    raise TypeError(f"no page for a {type(widget).__name__}")


def _called(statement: ast.stmt) -> str:
    """`walk` of a statement `widgets.walk(...)`; nothing of any other."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _binds(statement: ast.stmt) -> set[str]:
    """The names an import or an assignment gives a value; other statements are left out."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    return _names(statement, ast.Store) if isinstance(statement, ast.Assign | ast.AnnAssign) else set()


def _names(node: ast.AST, context: type) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, context)}


@cache
def _exact() -> pd.DataFrame:
    return grid.load()


def _calculator(widget: CalculatorWidget) -> str:
    return page.calculator_html(_exact(), widget.setting, widget.gpu)


_FRAGMENTS: dict[type, Callable[..., str]] = {
    WalkWidget: lambda widget: page.walk_fragment(widget.data),
    CalculatorWidget: _calculator,
    GuessWidget: lambda widget: page.guesses_html(guesses.QUESTIONS, {}),
}
