"""SimulatedGpu: the faces it puts on, how it takes them off, and small cases with known answers."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpt2.memory import gpus
from gpt2.memory.operators import autocast
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.values import ValueReadError

MiB = 2**20
FACES = ("device", "is_cuda", "to", "cuda", "cpu", "item", "tolist", "numpy", "__bool__", "__repr__", "data_ptr")


def state():
    return (
        [getattr(torch.Tensor, name) for name in FACES],
        torch.cuda.is_available(),
        hasattr(torch._C, "_cuda_memoryStats"),
        torch.tensor,
        torch.nn.Parameter.__new__,
        torch.serialization.location_tag,
        torch.clear_autocast_cache,
        torch.utils.data.DataLoader.__init__,
        len(torch.nn.modules.module._global_forward_pre_hooks),
    )


def test_everything_is_restored_also_after_an_exception():
    before = state()
    with pytest.raises(KeyError), SimulatedGpu("A40"):
        assert torch.cuda.is_available() and torch.zeros(2, device="cuda").is_cuda
        raise KeyError
    assert state() == before
    assert torch.nn.functional.dropout(torch.ones(4, device="meta"), 0.5).device.type == "meta"
    linear = nn.Linear(2, 2)
    assert linear.weight.device.type == "cpu" and float(linear(torch.ones(2)).sum()) == float(
        linear(torch.ones(2)).sum()
    )


def test_a_card_is_entered_once_at_a_time():
    card = SimulatedGpu("T4")
    with card, pytest.raises(RuntimeError, match="already entered"):
        card.__enter__()


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"gpu": "A41"}, "unknown GPU 'A41'; known: T4, A40, A100, H100, H200, RTX 4090"),
        ({"torch": "1.13"}, "not a release from 2.5 on"),
        ({"allocator_conf": "max_split:1"}, "max_split"),
    ],
)
def test_bad_arguments_are_one_clear_line(bad, message):
    with pytest.raises(ValueError) as error:
        SimulatedGpu(**bad)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", gpus.names())
def test_what_torch_cuda_says_of_a_card(name):
    gpu = gpus.find(name)
    with SimulatedGpu(name):
        assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
        assert torch.cuda.get_device_name() == gpu.device_name
        assert torch.cuda.get_device_capability() == gpu.capability
        assert torch.cuda.mem_get_info() == (gpu.free_bytes_at_start, gpu.memory_bytes)
        assert torch.cuda.get_device_properties(0).total_memory == gpu.memory_bytes
        assert torch.cuda.get_device_properties(0).multi_processor_count == gpu.sms


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.zeros(3, device=torch.device("cuda", 0)),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.as_tensor([1.0], device="cuda:0"),
        lambda: torch.arange(4, device="cuda"),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).to("cuda"),
        lambda: torch.zeros(3).to(torch.zeros(1, device="cuda")),
        lambda: torch.zeros(3).to("cuda", torch.float16),
        lambda: torch.zeros(3).to(device="cuda", dtype=torch.int64),
        lambda: nn.Linear(3, 3).cuda().weight,
        lambda: nn.Linear(3, 3).to("cuda").bias,
        lambda: nn.Linear(3, 3, device="cuda").weight,
        lambda: torch.randn(2, generator=torch.Generator(device="cuda"), device="cuda"),
        lambda: F.one_hot(torch.tensor([1], device="cuda"), 4),
        lambda: torch.zeros(2, device="cuda").new_zeros(3),
    ],
)
def test_every_way_to_the_card_arrives_there(make):
    with SimulatedGpu("A40"):
        tensor = make()
        assert tensor.is_cuda and tensor.device == torch.device("cuda", 0) and tensor.data_ptr() > 0
        assert torch.cuda.memory_allocated() >= 512


def test_default_device_contexts():
    with SimulatedGpu("A40"), torch.device("cuda"):
        assert torch.zeros(2).is_cuda and torch.tensor(3).is_cuda


def test_a_second_gpu_does_not_exist():
    with SimulatedGpu("A40"), pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2).to("cuda:1")


def test_moving_a_module_keeps_parameters_and_ties():
    with SimulatedGpu("A40"):
        a, b = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)
        b.weight = a.weight
        model, weight = nn.Sequential(a, b), a.weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.cuda()
        assert a.weight is weight is b.weight and optimizer.param_groups[0]["params"][0].is_cuda
        assert torch.cuda.memory_allocated() == 40_448


def test_values_read_print_as_nan_once_warned_and_refuse_comparison():
    with SimulatedGpu("A40"):
        loss = torch.randn((), device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert f"{loss.item():.3f}" == "nan" and str(loss.item() * 2) == "nan"
            assert loss.cpu().isnan().all() and loss.tolist() != loss.tolist()
            with pytest.raises(ValueReadError, match=r"test_simulator\.py:\d+: a comparison or a branch"):
                assert loss.item() < 3
        with pytest.raises(ValueReadError, match=r"test_simulator\.py:\d+: the truth of a tensor"):
            bool(loss > 0)


def test_addresses_tell_what_shares_memory():
    with SimulatedGpu("A40"):
        for device, same in (("cpu", False), ("cuda", False), ("meta", True)):
            a, b = (torch.empty(100_000, device=device) for _ in range(2))
            assert (a.data_ptr() == b.data_ptr()) is same, device
            assert a[1:].data_ptr() - a.data_ptr() == (0 if same else 4), device
            assert a[1:].untyped_storage().data_ptr() == a.data_ptr(), device


def test_out_of_memory_is_torchs_own_error_and_the_run_goes_on():
    with SimulatedGpu("T4") as card:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20.00 GiB"):
            torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")
        assert card.out_of_memory["requested_bytes"] == 20 * 2**30
        assert torch.zeros(2, device="cuda").is_cuda


def test_memory_fraction_limits_and_statistics_follow():
    with SimulatedGpu("A40"):
        torch.cuda.set_per_process_memory_fraction(0.01)
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(2**30, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        assert "CUDA OOMs: 1" in torch.cuda.memory_summary()


def test_loaders_with_workers_and_pinned_memory():
    data = torch.utils.data.TensorDataset(torch.ones(10, 30_000), torch.arange(10))
    with SimulatedGpu("A40"):
        loader = torch.utils.data.DataLoader(data, 4, num_workers=2, pin_memory=True, prefetch_factor=2)
        assert [x.cuda(non_blocking=True).shape[0] for x, _ in loader] == [4, 4, 2]


def test_saved_and_loaded_tensors_are_on_the_card(tmp_path):
    with SimulatedGpu("A40"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(nn.Linear(100, 100).cuda().state_dict(), tmp_path / "a.pt")
        before = torch.cuda.memory_allocated()
        loaded = torch.load(tmp_path / "a.pt")
        assert loaded["weight"].is_cuda and torch.cuda.memory_allocated() - before == 40_448 + 512
        assert not torch.load(tmp_path / "a.pt", map_location="cpu")["weight"].is_cuda


def test_autocast_lists_are_those_of_the_header():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    for macro, names in (
        ("LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("FP32", autocast.FP32),
        ("FP32_SET_OPT_DTYPE", autocast.FP32_BY_DTYPE),
        ("PROMOTE", autocast.PROMOTE),
    ):
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)(?:\n\s*\n|\n#)", text, re.S)[1]
        listed = {m.replace(", ", ".") for m in re.findall(r"_\((\w+(?:, \w+)?)\)", body)}
        assert listed == set(names), macro


# --- small cases with right answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu, kept", [("A40", 8_519_680), ("T4", 8_519_680), ("H100", 33_554_432)])
def test_case_2_a_matmul_leaves_the_librarys_workspace(gpu, kept):
    with SimulatedGpu(gpu, torch="2.6.0"):
        for _ in range(2):
            linear, x = nn.Linear(1, 1, bias=False).cuda(), torch.ones(1, 1, device="cuda")
            y = linear(x)
            del linear, x, y
            assert torch.cuda.memory_allocated() == kept


def test_case_3_a_slice_keeps_its_whole_storage():
    with SimulatedGpu("A40"):
        x = torch.zeros(1000, 1000, device="cuda")
        row = x[:1]
        del x
        assert torch.cuda.memory_allocated() == 4_000_256  # 4,000,000 rounded to 512
        row = row.clone()
        assert torch.cuda.memory_allocated() == 4_096  # 4,000
        del row


def test_case_6_max_pool_keeps_int64_indices():
    with SimulatedGpu("A40"), torch.no_grad():
        net = nn.Sequential(nn.Conv2d(3, 28, 3), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, 1)).cuda()
        x = torch.zeros(512, 3, 224, 224, device="cuda")
        assert round(torch.cuda.memory_allocated() / MiB, 1) == 294.0
        y = net[0](x)
        torch.cuda.reset_peak_memory_stats()
        y = net[1](y)
        y = net[2](y)
        asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] / MiB
        assert round(asked, 1) == 5_010.6  # blocks too small to split make it 5,012.0
        assert round(torch.cuda.memory_allocated() / MiB, 1) == 465.5


def test_case_15_a_weight_is_cast_once_in_an_autocast_block():
    with SimulatedGpu("A40"):
        linear = nn.Linear(128, 128, bias=False).cuda()
        x = torch.ones(1, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for enabled, copies in ((True, 1), (False, 4)):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                linear(x)  # the workspace
            start = torch.cuda.memory_allocated()
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=enabled):
                kept = [linear(x) for _ in range(4)]
                assert torch.cuda.memory_allocated() - start == copies * 32_768 + 4 * 512
            del kept


def test_case_18_dropout_keeps_a_byte_per_element():
    with SimulatedGpu("A40"):
        x = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
        start = torch.cuda.memory_allocated()
        y = F.dropout(x, 0.1)
        assert torch.cuda.memory_allocated() - start == 4 * MiB + 1 * MiB
        del y
        gelu = F.gelu(x, approximate="tanh")
        assert torch.cuda.memory_allocated() - start == 4 * MiB
        del gelu


def test_gradients_that_meet_are_added_in_place_only_if_nobody_else_holds_them():
    with SimulatedGpu("A40") as card:
        x = torch.zeros(1000, device="cuda", requires_grad=True)
        y = x * 1
        (y * 2 + y * 3).backward(torch.ones(1000, device="cuda"))
        operators = [e.operator for e in card.events if e.phase == "backward" and e.action == "alloc"]
        assert operators == ["aten.mul"] * 3  # two products and the first factor's; the sum takes nothing


def test_integers_and_masks_are_known_where_they_come_from_the_host_or_from_constants():
    with SimulatedGpu("A40"):
        mask = torch.ones(2, 5, dtype=torch.int64, device="cuda")
        assert mask.all() and int(mask.sum()) == 10 and (mask[:, :3] == 1).sum().item() == 6
        mask[1, 3:] = 0
        assert not mask.all() and mask.tolist()[1] == [1, 1, 1, 0, 0]
        lengths = torch.tensor([3, 1, 2]).cuda()
        assert lengths.max().item() == 3 and lengths.cpu().tolist() == [3, 1, 2]
        rows = torch.randn(4, 7, device="cuda")[torch.tensor([True, False, True, True], device="cuda")]
        assert rows.shape == (3, 7) and lengths.nonzero().shape == (3, 1) and lengths.unique().tolist() == [1, 2, 3]
        with pytest.raises(ValueReadError):
            rows[rows > 0]


def test_constants_are_known_random_and_written_values_are_not():
    with SimulatedGpu("A40"):
        ones, state = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        assert ones.sum() == 3 and not state.any()
        torch._foreach_add_([state], [torch.randn(3, device="cuda")])
        for tensor in (torch.randint(0, 9, (3,), device="cuda"), state, torch.empty(3, device="cuda"), ones * state):
            with pytest.raises(ValueReadError):
                bool((tensor > 0).all())


def test_log_lines_go_on_and_guards_against_bad_numbers_do_not_stop():
    import json
    import math

    with SimulatedGpu("A40"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = torch.randn((), device="cuda")
        assert f"{float(loss):.2f} {loss:.3f} {loss.item():.1f}" == "nan nan nan"
        assert math.isfinite(loss.item()) and not math.isnan(loss.item()) and json.dumps([loss.item()]) == "[NaN]"
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()
        assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
        assert loss.type() == "torch.cuda.FloatTensor"
    assert not torch.accelerator.is_available() or torch.cuda.is_available()
    assert math.isnan(float("nan"))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.item(),
        lambda x: x.cpu(),
        lambda x: torch.ones(1).cuda(),
        lambda x: torch.ones(1, device="cuda").nonzero(),
        lambda x: None,
    ],
)
def test_a_copy_that_blocks_waits_for_the_stream(wait):
    with SimulatedGpu("H200") as card, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, side = torch.randn((), device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            batch = torch.empty(2**22, device="cuda")
        batch.record_stream(torch.cuda.current_stream())
        del batch
        wait(loss)
        torch.empty(1, device="cuda")
        assert [e.action for e in card.events].count("free_completed") == (wait(loss) is not None)
