"""Credentials of the store out of a Prefect block, for deployments whose workers have none in their environment."""

from __future__ import annotations

import logging
import os
from typing import Any

from flows.config import PipelineConfig
from infra.errors import InputError

logger = logging.getLogger("draftsmith.credentials")


async def use_credentials(config: PipelineConfig) -> None:
    """Put the keys of the config's `credentials_block` into this process's environment; nothing without one.

    Effects: sets AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, where the block has them, AWS_SESSION_TOKEN,
    AWS_DEFAULT_REGION and AWS_ENDPOINT_URL. Children inherit them. Call it before the root is touched.

    Raises:
        InputError: Prefect has no such block, or it holds no keys.
    """
    name = config.credentials_block
    if name is None:
        return
    from prefect_aws import AwsCredentials

    try:
        block: Any = await AwsCredentials.aload(name)
    except ValueError as error:
        raise InputError(
            "credentials_block", f"the Prefect server has no AWS Credentials block named {name!r}; create it there"
        ) from error
    if block.aws_access_key_id is None or block.aws_secret_access_key is None:
        raise InputError(
            "credentials_block", f"the block {name!r} lacks aws_access_key_id or aws_secret_access_key"
        )
    found = {
        "AWS_ACCESS_KEY_ID": block.aws_access_key_id,
        "AWS_SECRET_ACCESS_KEY": block.aws_secret_access_key.get_secret_value(),
        "AWS_SESSION_TOKEN": block.aws_session_token,
        "AWS_DEFAULT_REGION": block.region_name,
        "AWS_ENDPOINT_URL": block.aws_client_parameters.endpoint_url,
    }
    os.environ.pop("AWS_SESSION_TOKEN", None)  # one of other keys would make these wrong
    os.environ.update({variable: value for variable, value in found.items() if value is not None})
    logger.info("The store is reached with the credentials of the Prefect block %s.", name)
