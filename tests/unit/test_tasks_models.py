"""Models: parameter counts, costs, forward and backward; presets and their schedules.

Models that gossipx does not train are rows of ``gossipx/tasks/published.tsv``, checked by what the publications state.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import groupby

import pytest
import torch
from torch import Tensor, nn

from gossipx import policies
from gossipx.errors import UsageError
from gossipx.tasks import costs
from gossipx.tasks.costs import STEP_SECONDS, Cost, multiply_adds, published, published_sizes
from gossipx.tasks.data import TASKS, text_data
from gossipx.tasks.models import MODELS, LocalResponseNorm, Model, Transformer, build_model
from gossipx.tasks.presets import PRESETS, TEXT_MODEL, TEXT_TASK, Preset, cosine_rate, step_rate
from gossipx.tasks.presets import TASKS as TASK_NAMES

# Brown et al. 2020, arXiv:2005.14165. Table 2.1 gives GPT-3 XL 24 heads of 128 elements, which do not fit its width of
# 2048; 16 do. The output layer of GPT-2 is its token embedding; with one of its own, this model has 102,926,336
# parameters more than the 1.3 billion of the table.
GPT_3_XL = Model(partial(Transformer, width=2048, heads=16, blocks=24), 50_257, 0, 2048, 1)
BUILT = {**MODELS, "transformer-1b": GPT_3_XL}
UNTRAINED = ("inception-v4", "densenet121", "transformer-1b")

PARAMETERS = {
    "lenet": 102_882,
    "convnet": 89_578,
    "resnet20": 269_722,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "alexnet": 60_965_224,
    "googlenet": 6_998_552,
    "transformer": 354_144,
}
"""The parameters of the published layer shapes, added up by hand; auxiliary classifiers are left out."""

# The figures that the publications state where they round, in parameters, and how exactly they state them.
PUBLISHED = {
    "resnet20": (270_000, 5_000),
    "resnet56": (850_000, 5_000),
    "resnet110": (1_700_000, 50_000),
    "googlenet": (7_000_000, 50_000),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def as_published(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model of the published size, and one image or sequence for it, on torch's meta device."""
    facts = BUILT[name]
    with torch.device("meta"):
        shape = (1, facts.channels, facts.pixels, facts.pixels) if facts.channels else (1, facts.pixels)
        one = torch.empty(shape, dtype=torch.float32 if facts.channels else torch.int64)
        return facts.make(facts.classes, facts.channels, facts.pixels).eval(), one


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count_is_that_of_the_layer_shapes_and_the_stated_one(name: str) -> None:
    model, one = as_published(name)
    facts = MODELS[name]
    assert count(model) == PARAMETERS[name]
    assert model(one).shape == ((1, facts.classes) if facts.channels else (1, facts.classes, facts.pixels))
    if name in PUBLISHED:
        stated, exactness = PUBLISHED[name]
        assert abs(count(model) - stated) <= exactness


SIZES = [
    ("lenet", 1, 28),
    ("lenet", 3, 32),
    ("lenet", 1, 16),
    ("convnet", 1, 28),
    ("convnet", 3, 32),
    ("convnet", 1, 8),
    ("resnet20", 1, 28),
    ("resnet20", 3, 8),
    ("googlenet", 3, 31),
    ("googlenet", 1, 64),
    ("alexnet", 3, 39),
]


@pytest.mark.parametrize(("name", "channels", "pixels"), SIZES)
def test_forward_and_backward_reach_every_parameter(name: str, channels: int, pixels: int) -> None:
    torch.manual_seed(0)
    model = build_model(name, classes=7, channels=channels, pixels=pixels)
    model.eval()  # dropout could leave a unit out by chance
    logits = model(torch.randn(2, channels, pixels, pixels))
    assert logits.shape == (2, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 6])).backward()
    for parameter_name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, parameter_name
        assert gradient.isfinite().all(), parameter_name
        assert gradient.any(), parameter_name
        assert gradient.is_contiguous() and parameter.is_contiguous(), parameter_name  # channels last stays inside


def test_the_transformer_predicts_from_earlier_characters_only_and_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = build_model("transformer", classes=7, channels=0, pixels=16)
    text = torch.randint(0, 7, (2, 16))
    logits = model(text)
    nn.functional.cross_entropy(logits, text).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    later = text.clone()
    later[:, 9:] = (text[:, 9:] + 1) % 7
    changed = (model(later) != logits).any(1)  # (2, 16)
    assert not changed[:, :9].any() and changed[:, 9:].all()
    assert model(text[:, :9]).shape == (2, 7, 9)


@pytest.mark.parametrize("name", ["lenet", "convnet", "resnet20", "googlenet", "transformer"])
def test_the_global_seed_fixes_the_initial_weights(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = build_model(name, classes=10, channels=1, pixels=32)
        return nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        pytest.param("alexnet", 38, marks=pytest.mark.slow),
        pytest.param("googlenet", 30, marks=pytest.mark.slow),
        ("lenet", 15),
        ("convnet", 7),
    ],
)
def test_images_that_are_too_small_are_scaled_to_the_smallest_that_do(name: str, pixels: int) -> None:
    torch.manual_seed(0)
    model = build_model(name, classes=10, channels=1, pixels=pixels).eval()
    torch.manual_seed(0)
    larger = build_model(name, classes=10, channels=1, pixels=pixels + 1).eval()
    images = torch.randn(2, 1, pixels, pixels)
    scaled = nn.functional.interpolate(images, size=(pixels + 1, pixels + 1), mode="bilinear")
    assert torch.equal(model(images), larger(scaled))
    assert model.state_dict().keys() == larger.state_dict().keys()


def test_an_unknown_model_gives_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'resnet21' .did you mean 'resnet20'.*googlenet"):
        build_model("resnet21", classes=10, channels=1, pixels=28)
    with pytest.raises(UsageError, match=r"unknown model 'densenet' .did you mean 'densenet121'"):
        multiply_adds("densenet")


def test_convnets_normalisation_is_caffes_within_channel() -> None:
    maps = torch.rand(1, 2, 3, 3) * 100
    # Caffe sums the window's squares, zeros beyond the border, and divides by its full size.
    corner = maps[0, 1, :2, :2].square().sum() / 9
    expected = maps[0, 1, 0, 0] / (1 + 5e-5 * corner) ** 0.75
    torch.testing.assert_close(LocalResponseNorm()(maps)[0, 1, 0, 0], expected)


def test_residual_shortcut_pads_new_maps_evenly_on_both_sides() -> None:
    model = build_model("resnet20", classes=10, channels=1, pixels=8).eval()
    block = next(module for module in model.modules() if getattr(module, "grown", 0) == 16)
    nn.init.zeros_(block.second.weight)  # what is left is the shortcut
    maps = torch.rand(1, 16, 8, 8)
    out = block(maps)
    assert torch.equal(out[:, 8:24], maps[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()


# Costs: multiply-adds per tensor, and the time of an iteration


def total(name: str) -> int:
    return sum(cost.multiply_adds for cost in multiply_adds(name))


def by_name(name: str) -> dict[str, Cost]:
    return {cost.name: cost for cost in multiply_adds(name)}


@pytest.mark.parametrize("name", BUILT)
def test_the_rows_of_a_model_are_those_of_its_tensors(name: str) -> None:
    """A layer's outputs times its weights per output map, or two multiply-adds for each output."""
    model, one = as_published(name)
    adds: dict[Tensor, int] = dict.fromkeys(model.parameters(), 0)

    def add(layer: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
        first = next(layer.parameters(recurse=False))
        maps = getattr(layer, "out_channels", getattr(layer, "out_features", None))
        adds[first] += output.numel() // maps * first.numel() if maps else 2 * output.numel()

    for layer in model.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_hook(add)
    model(one)
    expected = [(of, tensor.numel(), adds[tensor]) for of, tensor in model.named_parameters()]
    assert [cost[:3] for cost in multiply_adds(name)] == expected


def test_inception_v4_has_the_parameters_of_either_convention_and_the_maps_of_figure_9() -> None:
    """42.65 million of TF-slim (Modularized Parameter Server, Table 1.1); 42.68 where normalisations scale, too.

    Szegedy et al. 2016: 35×35 maps after the stem, 17×17 and 8×8 after the reductions, where some branches are cut.
    """
    shifts = [cost for cost in multiply_adds("inception-v4")[:-1] if cost.name.endswith("bias")]
    assert sum(size for _, size in published_sizes("inception-v4")) == 42_648_232
    assert 42_648_232 + sum(cost.elements for cost in shifts) == 42_679_816, "as timm and pretrained-models.pytorch"
    sides = [math.isqrt(cost.multiply_adds // (2 * cost.elements)) for cost in shifts]
    assert [side for side, _ in groupby(sides)] == [149, 147, 73, 71, 73, 71, 35, 17, 35, 17, 8, 17, 8]


def test_densenet_121_has_the_parameters_of_table_1() -> None:
    """The stated figures of parameters and multiply-adds are those of torchvision."""
    layers = [cost for cost in multiply_adds("densenet121") if cost.elements > 1024]  # not normalisations
    assert sum(size for _, size in published_sizes("densenet121")) == 7_978_856
    assert sum(cost.name.endswith("weight") for cost in layers) == 121, "its layers"
    assert sum(cost.multiply_adds for cost in layers) / 1e9 == pytest.approx(2.83, abs=0.005)


def test_transformer_1b_has_the_1_3_billion_parameters_of_gpt_3_xl_and_an_output_layer() -> None:
    sizes = dict(published_sizes("transformer-1b"))
    total = sum(sizes.values())
    assert total == 1_418_649_600 == costs._PARAMETERS
    assert sizes["head.weight"] == 102_926_336 and round((total - sizes["head.weight"]) / 1e9, 1) == 1.3


@pytest.mark.parametrize("name", [*MODELS, *UNTRAINED])
def test_the_shares_of_a_models_tensors_sum_to_one(name: str) -> None:
    assert list(published()) == [*MODELS, *UNTRAINED]
    costs = multiply_adds(name)
    assert sum(cost.share for cost in costs) == pytest.approx(1, rel=1e-9)
    assert all(cost.share == pytest.approx(cost.multiply_adds / total(name)) for cost in costs[:3])
    assert all(cost.multiply_adds > 0 for cost in costs if not cost.name.endswith("bias")), "each layer computes"


def test_multiply_adds_of_lenet_by_hand() -> None:
    """5×5 convolutions with 8 maps of 24×24 and 32 maps of 8×8, and two linear layers."""
    costs = by_name("lenet")
    weights = {name: cost.multiply_adds for name, cost in costs.items() if name.endswith("weight")}
    assert [*weights.values()] == [24 * 24 * 8 * 25, 8 * 8 * 32 * 8 * 25, 512 * 184, 184 * 10]
    assert all(cost.multiply_adds == cost.share == 0 for name, cost in costs.items() if name.endswith("bias"))


def test_a_map_of_a_grouped_convolution_uses_the_maps_of_its_group() -> None:
    """AlexNet's second convolution: 256 maps of 27×27, each from 48 of 96 maps."""
    second = [cost for cost in multiply_adds("alexnet") if cost.name.endswith("weight")][1]
    assert second.multiply_adds == 27 * 27 * 256 * 48 * 25


def test_a_shift_without_a_scale_has_the_cost_of_its_normalisation() -> None:
    """Inception-v4's first one: 32 maps of 149×149, with two multiply-adds for each element."""
    assert by_name("inception-v4")["maps.0.1.bias"].multiply_adds == 2 * 32 * 149 * 149


@pytest.mark.parametrize(
    ("name", "billions", "exactness"),
    [
        ("alexnet", 0.724, 0.0005),
        ("googlenet", 1.58, 0.005),
        ("resnet110", 0.255, 0.0005),
        ("inception-v4", 12.28, 0.005),
        ("densenet121", 2.87, 0.005),
    ],
)
def test_multiply_adds_of_an_image(name: str, billions: float, exactness: float) -> None:
    """GoogLeNet was designed for about 1.5 billion (Szegedy et al. 2014, section 1)."""
    assert total(name) / 1e9 == pytest.approx(billions, abs=exactness)


def test_a_token_of_the_transformer_uses_each_weight_once() -> None:
    """All but the two embeddings, which are looked up."""
    embeddings = ("characters.weight", "positions.weight")
    matrices = [
        cost for cost in multiply_adds("transformer-1b") if cost.elements > 10_000 and cost.name not in embeddings
    ]
    assert len(matrices) == 4 * 24 + 1, "four per block, and the output layer"
    assert all(cost.multiply_adds == 2048 * cost.elements for cost in matrices)
    assert sum(cost.share for cost in matrices) > 0.999


def test_step_seconds() -> None:
    assert set(UNTRAINED) <= STEP_SECONDS.keys() <= {*MODELS, *UNTRAINED}
    assert STEP_SECONDS["resnet110"] == pytest.approx(0.0741, abs=5e-5)
    assert STEP_SECONDS["densenet121"] == pytest.approx(0.342, abs=5e-4)
    assert STEP_SECONDS["inception-v4"] == pytest.approx(0.680, abs=5e-4)


def test_step_seconds_of_adaptive_communication_follow_from_its_tables() -> None:
    """Minutes of tau:10 and of the adaptive policy, whose retrievals are fewer (Table II), over 50,000 iterations."""
    for name, minutes, fewer, retrievals in (("googlenet", 450, 360, 532), ("convnet", 30, 25, 250)):
        retrieval = 60 * (minutes - fewer) / (5000 - retrievals)
        assert STEP_SECONDS[name] == pytest.approx((60 * minutes - 5000 * retrieval) / 50_000, rel=2e-3)
    assert STEP_SECONDS["alexnet"] == 60 * 500 / 50_000, "Figure 6, without communication"


def test_densenets_time_suits_its_multiply_adds() -> None:
    """As many multiply-adds per second as Inception-v4's, within a tenth (Modularized Parameter Server, Table 1.1)."""
    rates = {
        name: images * total(name) / STEP_SECONDS[name] for name, images in (("densenet121", 64), ("inception-v4", 32))
    }
    assert rates["densenet121"] == pytest.approx(rates["inception-v4"], rel=0.1)


def test_transformer_1bs_time_is_that_of_its_multiply_adds_at_the_stated_rate() -> None:
    """Two operations per multiply-add, three times in forward and backward; 6 N D also counts the embeddings."""
    counted = 8 * 3 * 2 * total("transformer-1b") / 137e12
    assert counted < STEP_SECONDS["transformer-1b"] < 1.1 * counted


# Presets


def test_every_model_has_a_preset_and_every_task_a_model() -> None:
    assert PRESETS.keys() == MODELS.keys()
    assert tuple(TASKS) == TASK_NAMES and TEXT_TASK in TASKS
    assert {task.model for task in TASKS.values()} <= MODELS.keys() and TASKS[TEXT_TASK].model == TEXT_MODEL
    assert TASKS[TEXT_TASK].classes == MODELS[TEXT_MODEL].classes == text_data()[0].classes


def test_table_1_of_the_paper() -> None:
    def row(preset: Preset) -> tuple[float, ...]:
        return preset.lr, preset.gamma, preset.momentum, preset.weight_decay

    assert row(PRESETS["alexnet"]) == (0.01, 0.1, 0.9, 0.0005)
    assert row(PRESETS["googlenet"]) == (0.01, 0.96, 0.9, 0.0002)
    assert row(PRESETS["convnet"]) == (0.001, 0.1, 0.9, 0.004)
    thresholds = {name: preset.threshold for name, preset in PRESETS.items()}
    assert thresholds["alexnet"] == 0.025
    assert thresholds["googlenet"] == 0.02
    assert thresholds["convnet"] == 0.01


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_a_valid_spec_for_every_built_in_policy(name: str) -> None:
    specs = PRESETS[name].policies
    assert specs.keys() == policies.BUILT_IN.keys()
    for policy, spec in specs.items():
        assert policies.describe(policies.parse(spec)).partition(":")[0] == policy


def rate_at(preset: Preset, step: float, iterations: float) -> float:
    return step_rate(preset.lr, preset.gamma, preset.lr_steps, step, iterations)


@pytest.mark.parametrize(
    ("name", "gamma", "iterations", "size"),
    [("alexnet", 0.1, 450, 100), ("alexnet", 0.1, 450_000, 100_000), ("googlenet", 0.96, 10_000_000, 320_000)],
)
def test_schedules_are_caffes_step_scaled(name: str, gamma: float, iterations: int, size: int) -> None:
    """Caffe's "step": base · gamma^floor(iteration / stepsize), stepsize 100,000 of 450,000 for AlexNet."""
    for edge in range(0, iterations, size):
        for step in (edge, min(edge + size, iterations) - 1):
            assert rate_at(PRESETS[name], step, iterations) == pytest.approx(0.01 * gamma ** (step // size))


def test_convnets_and_the_residual_nets_schedules_at_their_published_lengths() -> None:
    convnet = {step: rate_at(PRESETS["convnet"], step, 70_000) for step in (0, 59_999, 60_000, 64_999, 65_000)}
    assert list(convnet.values()) == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5])
    resnet20 = [rate_at(PRESETS["resnet20"], step, 64_000) for step in (31_999, 32_000, 47_999, 48_000)]
    assert resnet20 == pytest.approx([0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize("iterations", [1, 7, 800, 64_000])
def test_a_cosine_rate_rises_to_the_base_and_falls_as_the_published_formula(iterations: int) -> None:
    """Loshchilov and Hutter 2017, Eq. 5: η_min + ½ (η_max − η_min) (1 + cos(π T_cur / T_i)), η_min 0."""
    rates = [cosine_rate(0.5, step, iterations) for step in range(iterations)]
    warm_up = round(0.05 * iterations)
    assert rates[:warm_up] == pytest.approx([0.5 * (step + 1) / warm_up for step in range(warm_up)])
    length = iterations - warm_up
    expected = [0.25 * (1 + math.cos(math.pi * step / length)) for step in range(length)]
    assert rates[warm_up:] == pytest.approx(expected)
    assert max(rates) == 0.5 and min(rates) > 0
