"""Round trips of many more arbitrary samples than ``make test`` has time for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import assert_same
from test_schema import round_trip, samples


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*Complex.* support is experimental", "ignore:torch.quantize_per")
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(samples, st.booleans(), st.booleans())
def test_arbitrary_samples(sample: Any, fixed: bool, copy: bool) -> None:
    assert_same(round_trip(sample, fixed=fixed, copy=copy), sample)
