from __future__ import annotations

import pytest

from passes.compat.patching.torch_releases import why_untested


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu126", "2.15.0a0+git1234"])
def test_tested_releases(version):
    assert why_untested(version) is None


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "2.16.0.dev20261101+cpu", "3.0.0"])
def test_untested_releases_are_named(version):
    why = why_untested(version)
    assert why is not None and version in why and "2.11 to 2.15" in why
