"""Ratios of two arms, paired by session."""

import numpy as np
import pytest

from loadtests.paired import Sample, compare, within

KINDS = {"short": 0.2, "long": 2.0}


def played(factor, pairs=30, noise=0.2, seed=0):
    """Sessions that differ much from one another, and both arms of one little."""
    rng = np.random.default_rng(seed)
    samples = []
    for pair in range(pairs):
        of_session = rng.lognormal(sigma=0.5)
        for kind, seconds in KINDS.items():
            for arm in ("on", "off"):
                for _ in range(2):
                    value = seconds * of_session * rng.lognormal(sigma=noise)
                    samples.append(
                        Sample(str(pair), kind, arm, value * (factor if arm == "on" else 1.0))
                    )
    return samples


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_known_factor_is_found_whatever_the_sessions(factor):
    report = compare(played(factor), "on", "off")
    for ratios in report.values():
        for statistic in ("median", "mean"):
            low, high = ratios[f"ratio_of_{statistic}s"]["interval"]
            assert low < factor < high
    assert report["long"]["on"]["turns"] == 60


def test_without_noise_the_interval_has_no_width():
    report = compare(played(1.2, noise=0.0), "on", "off")
    for ratios in report.values():
        assert ratios["ratio_of_means"]["interval"] == pytest.approx([1.2, 1.2])


def test_all_turns_weigh_the_kinds_by_their_number():
    samples = [
        Sample(pair, kind, arm, seconds)
        for pair in "ab"
        for kind, arm, seconds in [
            ("rare", "on", 4.0), ("rare", "off", 1.0),
            *[("often", "on", 1.0), ("often", "off", 1.0)] * 3,
        ]
    ]  # fmt: skip
    ratio = compare(samples, "on", "off")["all"]["ratio_of_medians"]["value"]
    assert ratio == pytest.approx(4 ** (1 / 4))


def test_one_pair_has_no_interval_and_a_pair_needs_both_arms():
    with pytest.raises(ValueError, match="two pairs"):
        compare(played(1.0, pairs=1), "on", "off")
    with pytest.raises(ValueError, match="both arms"):
        compare([s for s in played(1.0) if (s.pair, s.arm) != ("3", "on")], "on", "off")


@pytest.mark.parametrize(
    ("interval", "word"),
    [([0.9, 1.04], "yes"), ([0.9, 1.1], "undecided"), ([1.06, 1.2], "no")],
)
def test_a_verdict_needs_the_whole_interval(interval, word):
    assert within({"interval": interval}, 1.05) == word
