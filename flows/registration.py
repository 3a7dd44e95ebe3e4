"""What a Prefect server is told once: work pools, the store's credentials, the deployments of prefect.yaml."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker
from prefect_aws import AwsClientParameters, AwsCredentials
from pydantic import SecretStr

from infra.errors import InfrastructureError
from infra.locations import project_home


def make_pools(client: SyncPrefectClient, names: Iterable[str]) -> None:
    """Make work pools whose runs are processes beside their worker, where they are not there."""
    for name in names:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


def save_block(name: str, given: Mapping[str, str]) -> None:
    """Keep an S3 server's AWS_* variables in the Prefect block that `credentials_block` names; replaces it."""
    block = AwsCredentials(
        aws_access_key_id=given["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=SecretStr(given["AWS_SECRET_ACCESS_KEY"]),
        region_name=given["AWS_DEFAULT_REGION"],
        aws_client_parameters=AwsClientParameters(endpoint_url=given["AWS_ENDPOINT_URL"]),
    )
    block.save(name, overwrite=True)


def deploy_all(variables: Mapping[str, str]) -> None:
    """Register every deployment of prefect.yaml, without DRAFTSMITH_HOME: each worker fills in its own.

    Args:
        variables: that name the server.

    Raises:
        InfrastructureError: Prefect refused one.
    """
    environment = {**os.environ, **variables}
    environment.pop("DRAFTSMITH_HOME", None)
    argv = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(
        argv,
        env=environment,
        cwd=project_home(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InfrastructureError(f"`prefect deploy --all` failed: {(done.stdout + done.stderr)[-2000:]}")
