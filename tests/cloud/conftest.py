"""A server of our own for each test, and moto once for all."""

import pytest
from cloud.s3_server import S3Server


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """Our S3 server; clients find it by the environment."""
    server = S3Server(tmp_path / "s3-server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    yield server
    server.close()
