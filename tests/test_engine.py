"""The order in which the autograd engine runs a graph that a backward pass made."""

import warnings

import torch

from gpt2.memory.simulator import SimulatedGpu


def _numbers(tensor) -> int:
    return tensor.grad_fn._sequence_nr()


def test_what_a_backward_pass_made_runs_after_what_the_program_made():
    with SimulatedGpu("H200"):
        w = torch.nn.Parameter(torch.ones(8, device="cuda"))
        before = (w * 3).exp()
        (gradient,) = torch.autograd.grad((w * 2).exp().sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), w, create_graph=True)
        after = w * 4
        assert _numbers(gradient) < _numbers(second) < _numbers(before) < _numbers(after)
        order = []
        for name, tensor in (("before", before), ("gradient", gradient), ("after", after)):
            tensor.grad_fn.register_prehook(lambda _, name=name: order.append(name))
        (before.sum() + gradient.sum() + after.sum()).backward()
        assert order == ["after", "before", "gradient"]


def test_gradients_that_were_added_up_have_a_graph_of_the_engine_too():
    with SimulatedGpu("H200"):
        w = torch.nn.Parameter(torch.ones(8, device="cuda"))
        before = (w * 3).exp()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the cycle that create_graph makes
            before.sum().backward(create_graph=True)
        assert _numbers(w.grad) < _numbers(before)
        w.grad = None


def test_a_graph_of_the_host_keeps_its_order():
    x = torch.ones(2, requires_grad=True)
    with SimulatedGpu("H200"):
        before = x * 2
        (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
        assert _numbers(gradient) > _numbers(before)
