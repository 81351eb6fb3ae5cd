"""The laws of reshard.testing, run on every kind of store that reshard writes."""

import itertools

import pytest

from reshard.storage.stores.urls import open_store
from reshard.testing import StoreLaws

NUMBERS = itertools.count()


class TestObjectStore(StoreLaws):
    @pytest.fixture
    def store(self, s3):
        return open_store("s3://bucket/run")


class TestFsspec(StoreLaws):
    """fsspec's memory:// has no stamps, and shows files from the start."""

    NOTICES_CHANGES = HIDES_UPLOADS = False

    @pytest.fixture
    def store(self):
        return open_store(f"memory://laws-{next(NUMBERS)}")
