"""Work-pool templates: whole by Prefect's rules, and what a run gets of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prefect.utilities.templating import apply_values
from prefect.workers.process import ProcessJobConfiguration

from infra.locations import project_home

FOLDER = project_home() / "deployments" / "work-pools"
CONTAINERS = project_home() / "deployments" / "containers"
NO_SERVER: Any = object()  # nothing is asked of it; without one, Prefect would start a server
POOLS = ("process", "docker", "kubernetes")
GIVEN_BY_THE_WORKER = {"name", "labels", "command"}


def template(pool: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{pool}.json").read_text())
    return found


def rendered(pool: str, **values: Any) -> dict[str, Any]:
    """The job configuration of a run, as a worker makes it."""
    properties = template(pool)["variables"]["properties"]
    defaults = {name: one["default"] for name, one in properties.items() if "default" in one}
    found: dict[str, Any] = apply_values(template(pool)["job_configuration"], {**defaults, **values})
    return found


@pytest.mark.parametrize("pool", POOLS)
def test_each_variable_is_used_and_each_used_one_is_declared(pool: str) -> None:
    whole = template(pool)
    properties = whole["variables"]["properties"]
    jsonschema.Draft202012Validator.check_schema(whole["variables"])
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(whole["job_configuration"])))
    assert used == set(properties)
    defaults = {name: one["default"] for name, one in properties.items() if "default" in one}
    jsonschema.validate(defaults, whole["variables"])
    assert all(one["title"] and one["description"].endswith(".") for one in properties.values())
    assert defaults["stream_output"] is False
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"env": "PREFECT_HOME=x"}, whole["variables"])


async def test_the_process_template_is_what_its_worker_takes() -> None:
    found = await ProcessJobConfiguration.from_template_and_values(
        template("process"), {"env": {"AWS_DEFAULT_REGION": "eu-1"}}, client=NO_SERVER
    )
    assert not found.stream_output
    assert found.env["AWS_DEFAULT_REGION"] == "eu-1"


def test_a_container_gets_gpus_and_shared_memory() -> None:
    created = rendered("docker", gpus=4, shm_size="32g")["container_create_kwargs"]
    assert created["device_requests"] == [{"driver": "nvidia", "count": 4, "capabilities": [["gpu"]]}]
    assert created["shm_size"] == "32g"
    from docker.types import HostConfig

    host = HostConfig("1.47", shm_size=created["shm_size"], device_requests=created["device_requests"], init=True)
    assert host["ShmSize"] == 32 * 2**30
    assert host["DeviceRequests"][0]["Count"] == 4


def test_a_pod_gets_gpus_shared_memory_secrets_and_a_node() -> None:
    job = rendered("kubernetes", gpus=2, node_selector={"gpu": "b300"})["job_manifest"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["envFrom"] == [{"secretRef": {"name": "draftsmith", "optional": True}}]
    assert pod["nodeSelector"] == {"gpu": "b300"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert job["spec"]["backoffLimit"] == 0, "Prefect puts a run back, not Kubernetes"
    assert "{{" not in json.dumps({**job, "metadata": None}).replace('"{{ command }}"', "")


@pytest.mark.parametrize("file", ["pipeline", "node"])
def test_container_files_copy_and_make_what_there_is(file: str) -> None:
    text = (CONTAINERS / f"{file}.Containerfile").read_text()
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert Path(project_home(), name).exists(), name
    makefile = (project_home() / "Makefile").read_text()
    targets = re.findall(r"(?:RUN|&&) make (\S+)", text)
    assert len(targets) == 1, "each makes one environment"
    assert re.search(rf"^{re.escape(targets[0])}:", makefile, re.MULTILINE)
    assert not re.search(r"(TOKEN|SECRET|PASSWORD)\w*=", text)
    assert text.rstrip().splitlines()[-1].startswith(("CMD", "USER draftsmith"))
