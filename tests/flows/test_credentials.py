"""Keys of a Prefect block reach the environment of the process and nothing that is written."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from prefect_aws import AwsClientParameters, AwsCredentials
from pydantic import SecretStr

from flows.config import PipelineConfig, load_config
from flows.credentials import use_credentials
from infra.errors import InputError
from infra.stores.s3_client import VARIABLES

HOME = Path(__file__).resolve().parents[2]
SECRET = "not-to-be-seen"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that the code under test sets are taken back afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "before")


def config(block: str | None) -> PipelineConfig:
    named = [] if block is None else [f"credentials_block={block}"]
    return load_config(str(HOME / "deployments" / "smoke.yaml"), named)


def stored(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    async def aload(name: str) -> AwsCredentials:
        if name != "store":
            raise ValueError(f"Unable to find block document named {name} for block type aws-credentials")
        return AwsCredentials(**fields)

    monkeypatch.setattr(AwsCredentials, "aload", staticmethod(aload))


async def test_the_blocks_keys_are_the_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = AwsClientParameters(endpoint_url="http://store.example:9000")
    keys = {"aws_access_key_id": "block-key", "aws_secret_access_key": SecretStr(SECRET)}
    stored(monkeypatch, **keys, region_name="eu-west-1", aws_client_parameters=parameters)
    with caplog.at_level(logging.DEBUG):
        await use_credentials(config("store"))
    assert os.environ["AWS_ACCESS_KEY_ID"] == "block-key"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET
    assert os.environ["AWS_ENDPOINT_URL"] == "http://store.example:9000"
    assert os.environ["AWS_DEFAULT_REGION"] == "eu-west-1"
    assert "AWS_SESSION_TOKEN" not in os.environ, "another key's token"
    assert SECRET not in caplog.text
    assert SECRET not in config("store").model_dump_json()


async def test_without_a_block_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    await use_credentials(config(None))
    assert {os.environ[name] for name in VARIABLES} == {"before"}


async def test_a_block_that_is_not_there_is_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stored(monkeypatch)
    with pytest.raises(InputError, match=r"^credentials_block: .*'other'"):
        await use_credentials(config("other"))
    with pytest.raises(InputError, match=r"^credentials_block: .*lacks"):
        await use_credentials(config("store"))


def test_the_block_is_in_no_key() -> None:
    assert config("store").content() == config(None).content()


@pytest.mark.prefect
async def test_a_real_prefect_server_gives_the_keys_to_a_flow(caplog: pytest.LogCaptureFixture) -> None:
    from prefect import flow
    from prefect.testing.utilities import prefect_test_harness

    @flow
    async def deployed(name: str) -> str:
        await use_credentials(config(name))
        return os.environ["AWS_ACCESS_KEY_ID"]

    with prefect_test_harness(server_startup_timeout=120), caplog.at_level(logging.DEBUG):
        keys = {"aws_access_key_id": "stored-key", "aws_secret_access_key": SecretStr(SECRET)}
        await AwsCredentials(**keys).asave("store")
        assert await deployed("store") == "stored-key"
        assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET
        with pytest.raises(InputError, match="'other'"):
            await deployed("other")
    assert SECRET not in caplog.text
