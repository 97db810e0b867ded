"""Fixtures of the tests that drive real verl."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def verl_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's recipe runs keep task, checkpoints and logs; the task is made once."""
    return tmp_path_factory.mktemp("verl_fuse_home")
