"""A real S3 server for tests: Ceph's RADOS Gateway with one monitor and one OSD, on loopback.

By hand: ``python tests/services/ceph.py DIR`` installs missing packages, starts the server, prints
the environment for S3 clients and runs until Ctrl-C; ``--install`` only installs.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import apt
from keeper import DidNotStart, Facts, end, launch, tail, words_by_hand
from ports import free_ports

PACKAGES: Final = {
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "radosgw-admin": "radosgw",
    "ceph": "ceph-common",
    "monmaptool": "ceph-common",
}
"""Program → the Debian package that has it."""

REGION: Final = "us-east-1"
BUCKET: Final = "holdfast"
_READY_S: Final = 60.0
_POLICY: Final = Path("/usr/sbin/policy-rc.d")

# One OSD, so no replicas; memory instead of a disk: the data is worth nothing after the tests.
# Daemons trust each other (loopback only); S3 requests are authenticated by radosgw all the same.
_CONFIG: Final = """\
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{port}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
auth_allow_insecure_global_id_reclaim = false
admin_socket =
pid_file =
run_dir = {folder}
crash_dir = {folder}
log_file = {folder}/$name.log
log_to_syslog = false
err_to_stderr = true
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
[mon]
mon_data = {folder}/mon
mon_cluster_log_file = {folder}/cluster.log
mon_data_avail_crit = 1
mon_data_avail_warn = 2
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
[osd]
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = {memory_bytes}
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
osd_max_object_size = 134217728
[client]
ms_mon_client_mode = crc
rgw_thread_pool_size = 64
rgw_gc_obj_min_wait = 20
rgw_gc_processor_period = 5
rgw_gc_processor_max_time = 5
rgw_enable_usage_log = false
"""


def install() -> None:
    """Install missing packages. Raises ``CannotInstall``."""
    apt.install(PACKAGES, during=_no_daemons())


@contextlib.contextmanager
def _no_daemons() -> Iterator[None]:
    """Keep the packages' scripts from starting daemons of their own."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Facts]:
    """Run monitor, OSD and gateway with their data in ``folder``; yield what a client needs."""
    install()
    config = folder / "ceph.conf"
    port, fsid = free_ports(1)[0], str(uuid.uuid4())
    config.write_text(_CONFIG.format(fsid=fsid, port=port, folder=folder, memory_bytes=16 << 30))
    for part in ("mon", "osd"):
        (folder / part).mkdir()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "daemons.out").open("ab"))
        base = ("-c", str(config))

        def daemon(*command: str) -> None:
            stack.callback(end, launch(command, log))

        run_once(
            "monmaptool", "--create", "--clobber", "--addv", "a", f"[v2:127.0.0.1:{port}]",
            "--fsid", fsid, str(folder / "monmap"),
        )  # fmt: skip
        run_once("ceph-mon", *base, "-i", "a", "--mkfs", "--monmap", str(folder / "monmap"))
        daemon("ceph-mon", *base, "-i", "a", "-f")
        osd = str(uuid.uuid4())
        run_once("ceph", *base, "--connect-timeout", "30", "osd", "new", osd)
        run_once("ceph-osd", *base, "-i", "0", "--mkfs", "--osd-uuid", osd)
        daemon("ceph-osd", *base, "-i", "0", "-f")
        process, endpoint = gateway(config, "a", log)
        stack.callback(end, process)
        facts = {"config": str(config), "endpoint": endpoint, "region": REGION, "bucket": BUCKET}
        facts |= add_user(config, "holdfast")
        _await_bucket(facts, folder)
        yield facts


def gateway(
    config: Path, name: str, log: Any, *, port: int | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """Start one gateway of a running cluster; return its process and its endpoint."""
    port, data = port or free_ports(1)[0], config.with_name(f"rgw.{name}")
    data.mkdir(exist_ok=True)
    frontend = f"beast endpoint=127.0.0.1:{port} tcp_nodelay=1"
    options = ("-n", f"client.rgw.{name}", f"--rgw_data={data}", f"--rgw_frontends={frontend}")
    process = launch(["radosgw", "-c", str(config), *options, "-f"], log)
    return process, f"http://127.0.0.1:{port}"


def add_user(config: Path, name: str) -> dict[str, str]:
    """Make a user of the gateway; return its keys."""
    keys = {"access_key": f"HF{secrets.token_hex(9).upper()}", "secret_key": secrets.token_hex(20)}
    admin(
        config, "user", "create", f"--uid={name}", f"--display-name={name}", "--max-buckets=0",
        f"--access-key={keys['access_key']}", f"--secret-key={keys['secret_key']}",
    )  # fmt: skip
    return keys


def admin(config: Path, *command: str) -> str:
    """Run ``radosgw-admin``; return its output."""
    return run_once("radosgw-admin", "-c", str(config), *command)


def run_once(*command: str) -> str:
    """Run a program to its end. Raises ``DidNotStart`` with its output."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise DidNotStart(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def client(facts: Facts) -> Any:
    """Return a plain boto3 client for the server."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=facts["endpoint"],
        region_name=facts["region"],
        aws_access_key_id=facts["access_key"],
        aws_secret_access_key=facts["secret_key"],
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=5,
            read_timeout=20,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def _await_bucket(facts: Facts, folder: Path) -> None:
    """Wait until the gateway takes objects."""
    from botocore.exceptions import BotoCoreError, ClientError

    s3, deadline_s = client(facts), time.monotonic() + _READY_S
    while True:
        try:
            s3.create_bucket(Bucket=facts["bucket"])
            s3.put_object(Bucket=facts["bucket"], Key=".ready", Body=b"")
            break
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline_s:
                raise DidNotStart(f"{error}\n{tail(folder / 'daemons.out')}") from error
            time.sleep(0.05)


def await_gateway(facts: Facts) -> None:
    """Wait until a gateway of a running cluster answers."""
    _await_bucket(facts, Path(facts["config"]).parent)


def main() -> None:
    """Keep the service for the tests, or run it by hand."""
    words = words_by_hand(str(__doc__), cluster, install)
    folder = Path(words[0] if words else tempfile.mkdtemp(prefix="holdfast-s3-"))
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder) as facts:
        print(f"export AWS_ENDPOINT_URL_S3={facts['endpoint']}")
        print(f"export AWS_ACCESS_KEY_ID={facts['access_key']}")
        print(f"export AWS_SECRET_ACCESS_KEY={facts['secret_key']}")
        print(f"export AWS_DEFAULT_REGION={facts['region']}")
        print(f"# {json.dumps({'bucket': facts['bucket']})}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
