import time

import pytest
import torch

from labkit import timing


def test_the_median_and_the_cold_call_are_apart():
    calls = []

    def step():
        calls.append(1)
        time.sleep(0.03 if len(calls) == 1 else 0.002)

    result = timing.time_step(step, device="cpu", warmup=2, repeats=9)
    assert result.first_seconds >= 0.03 > 5 * result.median_seconds
    assert result.clock == "host" and 5 <= result.repeats <= 9
    assert len(calls) == 2 + result.repeats


def test_it_stops_when_the_time_is_up_but_not_before_there_is_a_median():
    result = timing.time_step(lambda: time.sleep(0.02), device="cpu", repeats=1000, least=5, max_seconds=0.01)
    assert result.repeats == 5


def test_a_steady_clock_needs_few_repeats_and_a_noisy_one_more():
    durations = iter([0.001, 0.02] * 500)
    noisy = timing.time_step(lambda: time.sleep(next(durations)), device="cpu", repeats=40, noise=0.01, max_seconds=60)
    steady = timing.time_step(lambda: time.sleep(0.02), device="cpu", repeats=40, noise=0.5, max_seconds=60)
    assert noisy.repeats == 40 and steady.repeats == 5


def test_ceilings_count_operations_and_bytes():
    product = timing.product_ceiling(torch.float32, 256, "cpu")
    assert product.rate == pytest.approx(2 * 256**3 / product.timing.median_seconds) and product.unit == "FLOP/s"
    copy = timing.copy_ceiling(2**22, "cpu")
    assert copy.rate == pytest.approx(2 * 2**22 / copy.timing.median_seconds) and copy.unit == "bytes/s"


def test_the_noise_floor_is_far_below_a_real_measurement():
    assert (
        timing.noise_floor("cpu").median_seconds
        < timing.product_ceiling(torch.float32, 512, "cpu").timing.median_seconds
    )
