"""Multi-process training: jax.distributed setup, broadcast and all-gather of strings."""

import contextlib
import inspect
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.checks import Checked, Size

T = TypeVar("T")

HANDSHAKE_SECONDS = 5.0  # timeout in which a connected process must send its id


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Checked):
    """Arguments of jax.distributed.initialize; Slurm, TPU pods and Open MPI provide them.

    Attributes:
        coordinator_address: Address of process 0 as host:port, reachable from the others.
        num_processes: Number of processes.
        process_id: Index of this process, from 0.
        initialization_timeout: Seconds in which all processes must start; after that all exit with
            an error.
        heartbeat_timeout: Seconds without a heartbeat after which a process counts as dead and all
            exit with an error; also how long a finished process waits for the others.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    initialization_timeout: Size = 300
    heartbeat_timeout: Size = 60

    def __post_init__(self):
        super().__post_init__()
        address, count, number = self.coordinator_address, self.num_processes, self.process_id
        if len({x is None for x in (address, count, number)}) > 1:
            raise ValueError(
                "coordinator_address, num_processes and process_id must be passed together or not "
                f"at all; got {address}, {count} and {number}."
            )
        if count is not None and number is not None and not 0 <= number < count:
            raise ValueError(f"process_id must be between 0 and {count - 1}; got {number}.")
        if address is not None and not is_host_port(address):
            raise ValueError(
                "coordinator_address must be host:port, with a port from 1 to 65535; got "
                f"{address!r}."
            )


def is_host_port(text: str) -> bool:
    """Whether `text` is host:port; an IPv6 host is in brackets."""
    host, _, port = text.rpartition(":")
    is_valid_host = host[:1] == "[" and host[-1:] == "]" or not set(host) & set(":[]/ ")
    digits = port.isascii() and port.isdecimal() and len(port) <= 5
    return bool(host) and is_valid_host and digits and 1 <= int(port) <= 65535


def initialize_distributed(hosts: DistributedConfig) -> None:
    """Call jax.distributed.initialize; must be the first use of JAX in the process.

    Args:
        hosts: Coordinator, number of processes and timeouts.

    Raises:
        ValueError: The coordinator is neither passed nor provided by a scheduler, or not all
            processes start in time. Under Slurm or another scheduler JAX aborts instead.
    """
    print(
        f"Waiting up to {hosts.initialization_timeout} seconds for the other processes; this one "
        f"is {hosts}. Each needs a different process_id and must reach the coordinator.",
        file=sys.stderr,
        flush=True,
    )
    if hosts.coordinator_address is not None:
        meet(hosts)
    seconds: dict[str, Any] = {
        "initialization_timeout": hosts.initialization_timeout,
        "heartbeat_timeout_seconds": hosts.heartbeat_timeout,
        "shutdown_timeout_seconds": hosts.heartbeat_timeout,  # unknown to JAX 0.7 and 0.8
    }
    known = inspect.signature(jax.distributed.initialize).parameters
    seconds = {name: limit for name, limit in seconds.items() if name in known}
    cluster = hosts.coordinator_address, hosts.num_processes, hosts.process_id
    try:
        jax.distributed.initialize(*cluster, **seconds)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"jax.distributed.initialize failed: {error} Except on Slurm, TPU pods and Open MPI, "
            "pass coordinator_address (host:port), num_processes and process_id."
        ) from error


def meet(hosts: DistributedConfig) -> None:
    """Wait until all processes have connected to the coordinator's port, before JAX uses it.

    JAX also waits, but then aborts the process without naming the missing ones.

    Raises:
        ValueError: Some are missing after `hosts.initialization_timeout` seconds; the message names
            them.
    """
    seconds = hosts.initialization_timeout
    wait, does = accept_processes, "cannot listen"
    if hosts.process_id:
        wait, does = connect_to_process_0, f"got no answer in {seconds} seconds"
    try:
        missing = wait(hosts, time.monotonic() + seconds)
        if not missing:
            return
        came = (hosts.num_processes or 0) - len(missing)
        what = (
            f"{came} of {hosts.num_processes} processes connected to {hosts.coordinator_address} "
            f"in {seconds} seconds; missing: {', '.join(map(str, missing))}."
        )
    except OSError as error:
        which = f"Process {hosts.process_id} of {hosts.num_processes}"
        what = f"{which} {does} at {hosts.coordinator_address}: {error}."
    raise ValueError(
        f"{what} Check that each process was started with the same coordinator_address and a "
        "different process_id from 0, that process 0 runs on the coordinator's machine, and that "
        "the others can reach this machine and port."
    )


def accept_processes(hosts: DistributedConfig, until: float) -> list[int]:
    """Process 0: accept the others and send them the ids that are still missing; returns these."""
    missing, connections = list(range(1, hosts.num_processes or 1)), list[socket.socket]()
    with contextlib.ExitStack() as stack:
        dual_stack = socket.has_dualstack_ipv6()
        family, at = socket.AF_INET6 if dual_stack else socket.AF_INET, ("", address(hosts)[1])
        server = socket.create_server(at, family=family, dualstack_ipv6=dual_stack)
        listening = stack.enter_context(server)
        while missing and (left := until - time.monotonic()) > 0:
            listening.settimeout(left)
            with contextlib.suppress(OSError, ValueError):  # may be an unrelated client
                connections.append(stack.enter_context(listening.accept()[0]))
                connections[-1].settimeout(HANDSHAKE_SECONDS)
                missing.remove(int(connections[-1].recv(16)))
            for connection in connections:
                with contextlib.suppress(OSError):  # the process may have ended
                    connection.sendall(json.dumps(missing).encode() + b"\n")
    return missing


def connect_to_process_0(hosts: DistributedConfig, until: float) -> list[int]:
    """Other processes: connect to process 0; returns the missing ids that it sends last.

    Raises:
        OSError: It never answers.
    """
    missing, reason = None, "no answer"
    while missing != [] and (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address(hosts), timeout=left) as connection:
                connection.sendall(str(hosts.process_id).encode())
                for line in connection.makefile():
                    missing = json.loads(line)
                    connection.settimeout(max(0.01, until - time.monotonic()))
        except (OSError, ValueError) as error:  # not started yet, or another program
            reason = str(error)
            time.sleep(min(0.2, left))
    if missing is None:
        raise OSError(reason)
    return missing


def address(hosts: DistributedConfig) -> tuple[str, int]:
    """Host and port of the coordinator."""
    host, _, port = (hosts.coordinator_address or "").rpartition(":")
    return host.strip("[]"), int(port)


def is_primary_process() -> bool:
    """Whether this is process 0, which logs and writes files.

    Returns:
        True in process 0.
    """
    return jax.process_index() == 0


def check_equal_across_processes(values: Mapping[str, Any]) -> None:
    """Raise on every process if configurations or devices differ between processes.

    Args:
        values: Flat dict of JSON values.

    Raises:
        ValueError: On every process; the message has each difference.
    """
    if jax.process_count() == 1:
        return
    device_info = {"local devices": [jax.local_device_count(), jax.local_devices()[0].device_kind]}
    texts = all_gather_strings(json.dumps({**values, **device_info}, sort_keys=True, default=str))
    values_by_process = [json.loads(text) for text in texts]
    lines = []
    for name in sorted(set().union(*values_by_process)):
        field = [values.get(name) for values in values_by_process]
        if differing := [i for i, value in enumerate(field) if value != field[0]]:
            i = differing[0]
            lines.append(f"  {name}: {field[0]} in process 0, {field[i]} in process {i}")
    if lines:
        raise ValueError("The processes have different settings:\n" + "\n".join(lines))


def broadcast_from_process_0(compute: Callable[[], T]) -> T:
    """Call `compute` on process 0 and return its value on all processes; also a barrier.

    Args:
        compute: Function that returns a JSON value; called on process 0 only.

    Returns:
        Its result, on every process.

    Raises:
        ValueError: On every process, if `compute` raises a ValueError or an OSError.
    """
    if jax.process_count() == 1:
        return compute()
    error_and_value: list[Any] = ["", None]
    if is_primary_process():
        try:
            error_and_value = ["", compute()]
        except (ValueError, OSError) as error:
            error_and_value = [str(error), None]
    error_message, value = json.loads(all_gather_strings(json.dumps(error_and_value))[0])
    if error_message:
        raise ValueError(error_message)
    return value


def all_gather_strings(text: str) -> list[str]:
    """All-gather one string per process, in process order."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = all_gather_arrays(np.asarray([len(encoded)]))
    padded = np.zeros(np.max(lengths), np.uint8)
    padded[: len(encoded)] = encoded
    rows = all_gather_arrays(padded)
    return [row[:n].tobytes().decode() for row, n in zip(rows, np.ravel(lengths), strict=True)]


def all_gather_arrays(x: np.ndarray) -> np.ndarray:
    """All-gather one array per process, stacked; all have the same shape."""
    first_device = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([device for _, device in sorted(first_device.items())]), "processes")
    sharded, replicated = NamedSharding(mesh, P("processes")), NamedSharding(mesh, P())
    rows = jax.make_array_from_callback((mesh.size, *x.shape), sharded, lambda _: x[None])
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(rows).addressable_data(0))
