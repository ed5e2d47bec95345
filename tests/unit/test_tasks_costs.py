"""Costs of models: multiply-adds per tensor, and the time of an iteration."""

from __future__ import annotations

import pytest
from published_models import FILE, UNTRAINED, rows

from gossipx.errors import UsageError
from gossipx.tasks.costs import STEP_SECONDS, Cost, multiply_adds, published
from gossipx.tasks.models import MODELS


def total(name: str) -> int:
    return sum(cost.multiply_adds for cost in multiply_adds(name))


def by_name(name: str) -> dict[str, Cost]:
    return {cost.name: cost for cost in multiply_adds(name)}


def test_the_file_is_that_of_the_models() -> None:
    """``python tests/published_models.py`` writes it anew."""
    assert FILE.read_text(encoding="utf-8").splitlines() == [row for name in MODELS | UNTRAINED for row in rows(name)]
    assert list(published()) == [*MODELS, *UNTRAINED]


@pytest.mark.parametrize("name", [*MODELS, *UNTRAINED])
def test_the_shares_of_a_models_tensors_sum_to_one(name: str) -> None:
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


def test_densenets_convolutions_have_the_2_83_billion_multiply_adds_that_torchvision_states() -> None:
    layers = [layer for layer in multiply_adds("densenet121") if layer.elements > 1024]  # not normalisations
    assert sum(layer.multiply_adds for layer in layers) / 1e9 == pytest.approx(2.83, abs=0.005)


def test_step_seconds() -> None:
    assert STEP_SECONDS.keys() >= UNTRAINED.keys() and STEP_SECONDS.keys() <= (MODELS | UNTRAINED).keys()
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


def test_an_unknown_model_gives_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'densenet' .did you mean 'densenet121'"):
        multiply_adds("densenet")
