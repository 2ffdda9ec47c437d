"""What tests need of torch that not every supported version has."""

from __future__ import annotations

import pytest

from lowp import compat

compiles_regions = pytest.mark.skipif(
    not compat.COMPILES_REGIONS, reason="the compiler of this torch does not follow regions"
)
