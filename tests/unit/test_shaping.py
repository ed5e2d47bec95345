"""The arguments that the emulated network passes to tc and nft."""

from __future__ import annotations

import pytest
from emulated.shaping import TokenBucket, Ways, netem, nft_rules
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("rate", "bucket"),
    [
        ("10mbit", TokenBucket(10_000_000, 32 << 10, 50)),
        ("100mbit", TokenBucket(100_000_000, 128 << 10, 50)),
        ("1gbit", TokenBucket(1_000_000_000, 256 << 10, 20)),
    ],
)
def test_rates_that_were_measured_get_the_buckets_that_gave_98_percent(rate: str, bucket: TokenBucket) -> None:
    assert TokenBucket.of(rate) == bucket


@given(st.floats(1, 39_000), st.floats(1.01, 4))
def test_a_faster_link_never_has_a_smaller_burst_or_a_longer_wait(megabits: float, factor: float) -> None:
    slow, fast = TokenBucket.of(f"{megabits:.3f}mbit"), TokenBucket.of(f"{megabits * factor:.3f}mbit")
    assert slow.rate < fast.rate
    assert slow.burst <= fast.burst
    assert slow.latency >= fast.latency


@pytest.mark.parametrize("rate", ["", "100", "fast", "10mbits", "-1mbit", "0mbit", "1e3kbit", "10 mbit"])
def test_an_invalid_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="is not a rate such as"):
        TokenBucket.of(rate)


@pytest.mark.parametrize(
    ("delay", "loss", "has_netem", "has_nft", "ways"),
    [
        (0, 0, True, True, Ways(None, None)),
        (5, 0, True, True, Ways("netem", None)),
        (5, 0, False, True, Ways("switch", None)),
        (0, 0.1, True, True, Ways(None, "nft")),
        (0, 0.1, True, False, Ways(None, "netem")),
        (0, 0.1, False, False, Ways(None, "switch")),
        (5, 0.1, False, True, Ways("switch", "nft")),
        (5, 0.1, False, False, Ways("switch", "switch")),
    ],
)
def test_the_mechanisms_of_delay_and_loss(
    delay: float, loss: float, has_netem: bool, has_nft: bool, ways: Ways
) -> None:
    assert Ways.choose(delay, loss, has_netem, has_nft) == ways
    assert ways.has_switch == (not has_netem and bool(delay or (loss and not has_nft)))


def test_netem_has_room_for_all_that_is_on_its_way() -> None:
    bucket = TokenBucket.of("1gbit")
    arguments = netem(Ways("netem", "netem"), bucket, 40.0, 0.01)
    assert arguments == ["netem", "limit", arguments[2], "delay", "40.0ms", "loss", "1.000000%"]
    assert int(arguments[2]) * 1500 * 8 > bucket.rate * 0.04
    assert netem(Ways(None, "netem"), bucket, 0.0, 0.5)[3:] == ["loss", "50.000000%"]


def test_nftables_drops_a_share_of_received_frames() -> None:
    assert 'iifname "eth0" numgen random mod 1000000 < 12500 counter drop;' in nft_rules(0.0125)
