"""What several tests of checkpoints start from."""

from pathlib import Path

import pytest
import tiny
from tiny_adapters import QV, trained


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    trained(tiny.hf_vision(), tmp_path / "adapter", **QV)
    return tmp_path / "adapter"
