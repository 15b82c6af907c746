"""cuDNN's workspaces, held to 23,000 passes of convolutions that ran on an H200."""

import math

import pytest
import torch

from gpt2.memory.kernels import convolution, depthwise
from gpt2.memory.kernels import convolution_choices as choices
from gpt2.memory.kernels.convolution_engines import FORWARD, INPUT, WEIGHT, Shape, engine, workspace
from gpt2.study import paths
from gpt2.study.probes import convolution_choices as made
from gpt2.study.probes import convolution_nets, convolution_rows, convolutions, runs
from gpt2.study.probes import convolution_tags as tags

FACTS, LINES = made.unpacked(paths.ROOT / "results" / made.RECORDED)
ASKED = [(choices.shape(which, line), int(line[f"{which}_bytes"])) for line in LINES for which in tags.PASSES]
LEFT_OUT = 5  # every fifth convolution, for the tests of what is not in the table


def tensors_bytes(shape):
    """X, W and Y."""
    images, groups = shape.images, shape.groups
    x = images * shape.channels * math.prod(shape.image)
    w = shape.filters * shape.channels // groups * math.prod(shape.kernel)
    return (x + w + images * shape.filters * math.prod(shape.out)) * shape.element_bytes


def test_a_convolution_that_was_observed_takes_what_it_took():
    wrong = [(shape, size) for shape, size in ASKED if workspace(shape, choices.choose(shape)) != size]
    assert not wrong


def test_all_but_a_few_workspaces_follow_from_a_formula():
    kinds = [choices.choose(shape).partial for shape, _ in ASKED]
    assert kinds.count("bytes") / len(kinds) < 0.01


def test_the_table_of_choices_is_what_the_recording_says():
    table = made.packed((*tags.SHAPE, *tags.PASSES), made.choices(LINES), FACTS)
    assert choices.OBSERVED.read_bytes() == table


@pytest.fixture(scope="module")
def left_out():
    """(shape, bytes taken, bytes predicted) of convolutions that the table was made without."""
    kept = [line for n, line in enumerate(LINES) if n % LEFT_OUT]
    table = choices.Choices(
        (choices.shape(which, line), engine(line[which])) for line in made.choices(kept) for which in tags.PASSES
    )
    asked = [ask for n, ask in enumerate(ASKED) if n // 3 % LEFT_OUT == 0]
    return [(shape, size, workspace(shape, table.engine(shape))) for shape, size in asked]


# (which pass, dtype, channels last): share met to the byte, share met within 2 % of workspace and tensors together.
MET = {
    (FORWARD, "fp32", False): (0.80, 0.87),
    (INPUT, "fp32", False): (0.83, 0.90),
    (WEIGHT, "fp32", False): (0.71, 0.79),
    (FORWARD, "bf16", False): (0.85, 0.92),
    (INPUT, "bf16", False): (0.84, 0.95),
    (WEIGHT, "bf16", False): (0.67, 0.80),
    (FORWARD, "fp16", False): (0.77, 0.88),
    (INPUT, "fp16", False): (0.77, 0.88),
    (WEIGHT, "fp16", False): (0.72, 0.77),
    (FORWARD, "fp32", True): (0.66, 0.81),
    (INPUT, "fp32", True): (0.74, 0.83),
    (WEIGHT, "fp32", True): (0.51, 0.67),
    (FORWARD, "bf16", True): (0.85, 0.94),
    (INPUT, "bf16", True): (0.84, 0.94),
    (WEIGHT, "bf16", True): (0.57, 0.71),
}


def test_the_nearest_observed_speak_for_one_that_is_not(left_out):
    found = {}
    for shape, size, predicted in left_out:
        near = abs(predicted - size) <= 0.02 * (size + tensors_bytes(shape))
        found.setdefault((shape.which, shape.dtype, shape.channels_last), []).append((predicted == size, near))
    shares = {key: tuple(sum(column) / len(rows) for column in zip(*rows, strict=True)) for key, rows in found.items()}
    assert set(shares) == set(MET)
    assert not {key: share for key, share in shares.items() if share[0] < MET[key][0] or share[1] < MET[key][1]}


def test_with_tf32_errors_nearly_cancel(left_out):
    asked = [ask for ask in left_out if ask[0].tf32]
    errors = [(predicted - size) / (size + tensors_bytes(shape)) for shape, size, predicted in asked]
    assert abs(sum(errors) / len(errors)) < 0.02


NET_FACTS, NET_LINES = made.unpacked(paths.ROOT / "results" / made.NETS)
IN_NETS = {choices.shape_of_any(line): int(line["bytes"]) for line in NET_LINES}


def test_nets_and_probes_say_the_same_of_the_same_pass():
    both = {shape: (size, IN_NETS[shape]) for shape, size in ASKED if shape in IN_NETS}
    assert len(both) >= 440
    assert not {shape: sizes for shape, sizes in both.items() if sizes[0] != sizes[1]}


def test_a_pass_that_was_observed_in_a_net_takes_what_it_took():
    assert not {s: size for s, size in IN_NETS.items() if workspace(s, choices.choose(s)) != size}


def test_the_probes_speak_for_nets_that_were_recorded_later():
    table = choices.Choices(list(choices.read())[: len(ASKED)])
    unseen = {shape: size for shape, size in IN_NETS.items() if shape not in table.exactly}
    errors = {s: abs(workspace(s, table.engine(s)) - size) / (size + tensors_bytes(s)) for s, size in unseen.items()}
    assert len(unseen) >= 500
    assert sum(error == 0 for error in errors.values()) / len(unseen) > 0.74
    assert sum(error <= 0.02 for error in errors.values()) / len(unseen) > 0.86


def test_the_table_of_passes_is_what_the_recordings_of_nets_say():
    probes = list(choices.read())[: len(ASKED)]
    lines = list(made.passes(NET_LINES[::25], probes))
    told = {choices.shape_of_any(line): engine(line["engine"]) for line in lines}
    assert told and told == {shape: choices.choose(shape) for shape in told}


def test_the_workspaces_of_a_net_are_read_out_of_its_recording():
    name = "autoencoder-bf16"
    assert name in convolution_nets.recordings()
    found = convolution_nets.passes(name)
    assert len(found) == 9
    assert found == {shape: IN_NETS[shape] for shape in found}


# One layer by hand: 64 filters of 3 x 7 x 7, stride 2, 16 images of 224 x 224 (the first of a ResNet).
STEM = Shape(FORWARD, "bf16", 16, 3, 64, (224, 224), (7, 7), (112, 112), (2, 2))


def test_conversion_rounds_channels_up():
    x, w, y = 16 * 8 * 224 * 224 * 2, 64 * 8 * 49 * 2, 16 * 64 * 112 * 112 * 2
    assert workspace(STEM, engine("xwy 8 8 - - 0 16")) == x + w + y + 16
    assert workspace(STEM, engine("x 1 1 - - 0 0")) == 16 * 3 * 224 * 224 * 2
    assert workspace(STEM, engine("X 1 1 - - 0 0")) == 16 * 3 * 224 * 224 * 4


@pytest.mark.parametrize(
    "words, size",
    [
        ("- 1 1 - - 0 0", 0),
        ("- 1 1 tiles 128x64 110 0", 110 * 128 * 64 * 4),
        ("- 1 1 split 64x64 5 0", 4 * 3 * 64 * 64 * 4 + 3 * 5 * 4),  # 64 x 147: three tiles
        ("- 1 1 weights - 20 144", 20 * 64 * 147 * 4 + 144),
        ("- 1 1 images - 0 0", 16 * 64 * 147 * 4),
        ("- 1 1 winograd - 0 0", 36 * 4 * (3 * 64 + 67 * 16 * 28 * 28)),
        ("- 1 1 fft 64x64 0 0", 16 * 64 * 112 * 112 * 4 + 2 * 8 * 33 * 64 * (16 * 67)),
        ("- 1 1 bytes - 1000 0", 1000),
    ],
)
def test_partial_results(words, size):
    assert workspace(STEM._replace(which=WEIGHT), engine(words)) == size
    assert str(engine(words)) == words


@pytest.mark.parametrize("points, rounds", [(28, 1), (30, 1), (31, 2), (224, 2)])
def test_images_that_fill_one_transform_are_not_cut(points, rounds):
    shape = Shape(INPUT, "fp32", 16, 64, 128, (points, points), (3, 3), (points, points), (1, 1), tf32=False)
    transforms = 64 * 128 + rounds * 16 * (64 + 128)
    assert workspace(shape, engine("- 1 1 fft-tiles 32x32 0 0")) == transforms * 17 * 32 * 8


def test_groups_are_rounded_up_one_by_one():
    shape = Shape(WEIGHT, "fp32", 16, 96, 96, (56, 56), (7, 7), (56, 56), (1, 1), groups=96, channels_last=True)
    assert workspace(shape, engine("x 4 4 - - 0 0")) == 16 * 4 * 96 * 56 * 56 * 4


def test_an_image_of_one_point_needs_nothing():
    shape = Shape(FORWARD, "bf16", 8, 480, 20, (1, 1), (1, 1), (1, 1), (1, 1))
    assert workspace(shape, choices.choose(shape)) == 0


@pytest.mark.parametrize(
    "dtype, kernel, stride, own",
    [
        (torch.bfloat16, 3, 1, True),
        (torch.float32, 7, 1, True),
        (torch.float16, 3, 1, False),
        (torch.float16, 7, 1, True),
        (torch.float16, 3, 2, True),
    ],
)
def test_who_computes_a_depthwise_convolution(dtype, kernel, stride, own):
    source, weight = meta(8, 64, 14, 14, dtype=dtype), meta(64, 1, kernel, kernel, dtype=dtype)
    where = [[stride, stride], [1, 1], [1, 1], False, [0, 0], 64]
    assert depthwise.native(source, weight, where) is own
    assert not depthwise.native(source, meta(64, 64, kernel, kernel, dtype=dtype), [*where[:-1], 1])


def test_groups_come_one_after_another_eight_at_a_time():
    grouped = Shape(FORWARD, "bf16", 8, 1088, 1088, (7, 7), (3, 3), (7, 7), (1, 1), groups=17)
    one = 2 * (2 * 8 * 64 * 49 + 64 * 64 * 9)  # bytes of one group's X, Y and W
    assert workspace(grouped, engine("xwy 8 8 groups - 8 16")) == 8 * (one + 16) == 1_392_768
    assert workspace(grouped._replace(channels=192, filters=192, groups=3), engine("xwy 8 8 groups - 8 16")) == 3 * (
        one + 16
    )


def meta(*sizes, dtype=torch.float32):
    return torch.empty(sizes, dtype=dtype, device="meta")


def test_one_dimension_is_an_image_of_height_one():
    asked = convolution.asked(FORWARD, meta(8, 64, 500), meta(32, 64, 3), meta(8, 32, 500), [1], False, 1)
    assert (asked.image, asked.kernel, asked.out, asked.stride) == ((1, 500), (1, 3), (1, 500), (1, 1))


def test_a_transposed_convolution_is_the_input_gradient_of_the_one_that_makes_its_input():
    small, large, weight = meta(8, 64, 16, 16), meta(8, 3, 32, 32), meta(64, 3, 4, 4)
    transposed = convolution.asked(FORWARD, small, weight, large, [2, 2], True, 1)
    assert transposed == convolution.asked(INPUT, large, weight, small, [2, 2], False, 1)


def test_only_fp32_depends_on_the_tf32_switch(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for dtype, tf32 in ((torch.float32, False), (torch.bfloat16, True)):
        x, w = meta(8, 64, 16, 16, dtype=dtype), meta(64, 64, 3, 3, dtype=dtype)
        assert convolution.asked(FORWARD, x, w, x, [1, 1], False, 1).tf32 is tf32


NHWC = (
    "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)0>(p)"
)
NCHW = NHWC.replace("nchwToNhwc", "nhwcToNchw")
WGRAD = (
    "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_warpgroupsize1x1x1_g1"
    "_execute_segment_k_on_kernel__5x_cudnn"
)
INIT = "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<xmma__5x_cudnn::wgrad>(p)"


def test_a_pass_is_told_by_its_kernels_in_three_words():
    grid = [1, 1, 1]
    ran = [[NHWC, [4, 1, 16], grid], [NHWC, [4, 1, 16], grid], [INIT, grid, grid], [WGRAD, [126, 1, 1], grid]]
    told = tags.tag([*ran, [NCHW, [1, 1, 64], grid]])
    assert told == "aai*b xmma.sm90.wgrad_indexed_f32f32_tf32f32_f32_nhwckrsc_nhwc.128x64x32.segment_k_on 16,64"


def test_what_a_pass_takes_besides_its_result():
    row = {"N": 2, "C": 4, "H": 8, "K": 4, "R": 1, "stride": 1, "pad": 0, "groups": 1}
    row |= {"dims": 2, "dtype": "fp32", "last": False, "tf32": True}
    row |= {"forward": [2048, 400, -400], "input": [2048], "weight": [64, 64, -64]}
    line = tags.reduced(row | {"forward kernels": [[NHWC, [1, 1, 1], [1, 1, 1]]]})
    assert [line[f"{which}_bytes"] for which in tags.PASSES] == [400, 0, 64]
    assert line["forward"] == "a - -" and line["input"] == "- - -"


def test_kernels_stand_between_the_marks_of_a_profile():
    mark = {"cat": "kernel", "name": "at::cuda::sleep::spin_kernel(long)", "args": {}}
    ran = {"cat": "kernel", "name": "conv", "args": {"grid": [1, 2, 3], "block": [32, 1, 1]}}
    events = [ran | {"ts": 0}, mark | {"ts": 3}, ran | {"ts": 2}, mark | {"ts": 1}, {"cat": "cpu_op", "ts": 2}]
    assert runs.kernels(events) == [[["conv", [1, 2, 3], [32, 1, 1]]], []]


def test_what_is_recorded_is_on_the_list_of_what_to_record():
    listed = {tuple(str(row[name]) for name in tags.SHAPE) for row in convolution_rows.configurations()}
    assert {tuple(line[name] for name in tags.SHAPE) for line in LINES} <= listed


def test_a_second_run_keeps_the_lines_of_the_first_on_the_same_card_and_releases(tmp_path):
    place = tmp_path / "convolution-probes.csv.gz"
    assert convolutions.recorded(place, FACTS) == []
    place.write_bytes(made.packed(tags.COLUMNS, LINES[:3], FACTS))
    assert convolutions.recorded(place, FACTS) == LINES[:3]
    assert convolutions.recorded(place, FACTS | {"cudnn": 92000}) == []
