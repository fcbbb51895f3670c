"""Samples spread over processes: torchrun, and a Ray cluster of two nodes, give the rows of the serial run."""

import os
import subprocess
import sys

import pytest

from momentkv.cli import main
from test_evals_run import command, lasting, text  # noqa: F401


@pytest.fixture(scope="session")
def serial(tmp_path_factory, text):  # noqa: F811
    out = tmp_path_factory.mktemp("serial") / "run"
    assert main(command(out, text)) == 0
    return lasting(out / "rows.jsonl")


def test_torchrun_shards(tmp_path, text, serial):  # noqa: F811
    out = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617"]
    run = [*launch, "-m", "momentkv.cli", *command(out, text)]
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert lasting(out / "rows.jsonl") == serial
    assert not list(out.glob("rows.*.jsonl")) and (out / "summary.json").exists()


RAY = """
import ray, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
assert len(ray.nodes()) == 2
from momentkv.cli import main
status = main(sys.argv[1:])
ray.shutdown()
cluster.shutdown()
sys.exit(status)
"""


def test_two_ray_nodes(tmp_path, text, serial):  # noqa: F811
    pytest.importorskip("ray")
    out = tmp_path / "run"
    run = [sys.executable, "-c", RAY, *command(out, text, "--engine", "ray", "--workers", "2")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert lasting(out / "rows.jsonl") == serial
