"""What tests of several kinds share: the real model, from the cache or fetched into it once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    from deploy.catalog import resolve
    from deploy.config import DEFAULT_MODEL

    return resolve(DEFAULT_MODEL, None, lambda *_: None)
