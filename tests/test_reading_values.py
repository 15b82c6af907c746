"""`float()` of a tensor without values: it goes on in a log line, and ends a program that decides by it."""

import dis
import inspect
import types

import pytest
import torch

from gpt2.memory import values
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.values import ValueReadError

pytestmark = pytest.mark.filterwarnings("ignore:.*value of a simulated tensor")


def by_if(x):
    if float(x.mean()) > 0:
        print("positive")


def by_while(loss, best=1.0):
    while float(loss) < best:
        best -= 1


def by_attribute(loss):
    limits = types.SimpleNamespace(best=1.0)
    return limits.best if float(loss) < limits.best else 0.0


def by_element(loss):
    seen = [1.0]
    return float(loss) < seen[-1]


def on_the_right(loss):
    return 1.0 >= float(loss)


def in_between(loss):
    return 0.0 < float(loss) < 1.0


def by_walrus(loss, best=1.0):
    if (value := float(loss)) < best:
        print(value)


def by_truth(loss):
    return "some" if float(loss) else "none"


def by_or(loss):
    return float(loss) or 1.0


def by_not(loss):
    return not float(loss)


def by_membership(loss):
    return float(loss) in (1.0, 2.0)


DECIDE = [by_if, by_while, by_attribute, by_element, on_the_right, in_between, by_walrus, by_truth, by_or, by_not,
          by_membership]


def in_print(loss):
    print(float(loss))


def in_a_sum(loss):
    total = 0.0
    total += float(loss)
    return total


def in_a_format(loss):
    return f"{float(loss):.3f} {float(loss)}"


def beside_a_condition(loss, flag=True):
    return max(float(loss), 1.0 if flag else 2.0), [float(loss), flag > 0], (float(loss), not flag)


def where_another_is_compared(loss, step=3):
    value = float(loss)
    return value if step > 2 else 0.0


def is_none(loss):
    return float(loss) is None or isinstance(float(loss), str)


def of_many(loss):
    return sum(map(float, [loss, loss]))


def kept(loss):
    value = float(loss)
    return value > 0


GO_ON = [in_print, in_a_sum, in_a_format, beside_a_condition, where_another_is_compared, is_none, of_many, kept]


@pytest.fixture(scope="module")
def loss():
    with SimulatedGpu("A40"):
        yield torch.randn((), device="cuda")


@pytest.mark.parametrize("decide", DECIDE, ids=lambda f: f.__name__)
def test_a_decision_by_a_float_names_its_line(decide, loss):
    lines, first = inspect.getsourcelines(decide)
    line = first + next(i for i, text in enumerate(lines) if "float(" in text)
    with pytest.raises(ValueReadError) as caught:
        decide(loss)
    assert str(caught.value).startswith(f"{__file__}:{line}: ")


@pytest.mark.parametrize("read", GO_ON, ids=lambda f: f.__name__)
def test_a_float_that_decides_nothing_at_once_goes_on(read, loss):
    for _ in range(2):
        read(loss)


def test_a_tensor_with_values_is_compared():
    with SimulatedGpu("A40"):
        assert float(torch.tensor(2.0)) > 1


def test_the_warning_says_what_a_kept_float_is(monkeypatch):
    monkeypatch.setattr(values, "_warned", False)
    with SimulatedGpu("A40"), pytest.warns(UserWarning, match=r"float\(\) kept in a variable is a plain nan"):
        assert repr(float(torch.randn((), device="cuda"))) == "nan"


@pytest.mark.parametrize("names", [
    ["PRECALL", "CALL", "LOAD_FAST", "COMPARE_OP"],  # 3.11, which may stand at either of the first two
    ["CALL", "LOAD_GLOBAL", "COMPARE_OP"],  # 3.12
    ["CALL", "COPY", "STORE_FAST_LOAD_FAST", "COMPARE_OP"],  # 3.13, a walrus
    ["CALL", "TO_BOOL", "POP_JUMP_IF_FALSE"],
    ["CALL", "COPY", "POP_JUMP_IF_TRUE"],
    ["PRECALL", "CALL", "POP_JUMP_FORWARD_IF_FALSE"],
])
def test_the_instructions_of_other_pythons(names, monkeypatch):
    code = [dis.Instruction(*[name, 0, 0, None, "", 2 * i][:6], *[None] * (len(dis.Instruction._fields) - 6))
            for i, name in enumerate(names)]
    monkeypatch.setattr(values.dis, "get_instructions", lambda _: iter(code))
    assert values._decides.__wrapped__(None, 0)
