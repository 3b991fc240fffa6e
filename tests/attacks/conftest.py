"""Fixtures of the attacks: the tiny target with conversations, and its servers."""

from tests.features.conftest import (  # noqa: F401
    conversations,
    dataset,
    fleet,
    other_dir,
    pytest_generate_tests,
    served,
    served_dir,
)
