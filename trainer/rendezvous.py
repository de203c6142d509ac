"""Static rendezvous: the head listens, every node knows its index, and whoever is missing is named.

Differs from torch's own static handler in what it says: a port in use, a head that cannot be reached, nodes that did
not arrive, and nodes that run something else are one-line errors, not stack traces after ten silent minutes.
"""

import json
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer import stop
from trainer.errors import UserError
from trainer.topology import Topology


class StaticRendezvous(RendezvousHandler):
    """One meeting of all nodes. `facts` are what every node must agree on, such as versions."""

    def __init__(self, topology: Topology, facts: dict[str, Any], timeout_s: float) -> None:
        self._topology = topology
        self._facts = facts
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.hosts: dict[int, str] = {}
        self.store: TCPStore | None = None
        self._server = 0

    def meet(self) -> TCPStore | None:
        """Open or reach the head's store and wait until every node has said hello. None if asked to stop meanwhile.

        Raises UserError naming the port in use, the unreachable head, the missing or the differing nodes.
        """
        self.store = self._listen() if self._topology.node_rank == 0 else self._reach()
        if self.store and self._say_hello(PrefixStore("hello", self.store)):
            return self.store
        return None

    def next_rendezvous(self) -> RendezvousInfo:
        assert self.store is not None, "meet() comes first"
        address = RendezvousStoreInfo(self._topology.master_addr, self.store.port)
        store = PrefixStore("agents", self.store)
        return RendezvousInfo(store, self._topology.node_rank, self._topology.nnodes, address)

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return "intermodal"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    @property
    def use_agent_store(self) -> bool:
        return True

    def _listen(self) -> TCPStore:
        """Serve the store from a process of its own: its threads would make forking the ranks unsafe.

        (A rank forked while the server's thread looks up a peer's name inherits glibc's resolver lock, for good.)
        """
        reader, writer = os.pipe()
        self._server = os.fork()
        if not self._server:
            _serve(self._topology, self._timeout_s, writer)
        os.close(writer)
        with os.fdopen(reader) as answer:
            told = answer.read()
        if not told.isdigit():
            self.close()
            if "EADDRINUSE" not in told and "in use" not in told:
                raise RuntimeError(told)
            hint = "another PET_MASTER_PORT (--master-port of the launcher), or end the run that holds it"
            raise UserError(f"Port {self._topology.master_port} of the head node is in use.", hint)
        return TCPStore("127.0.0.1", int(told), is_master=False, timeout=timedelta(seconds=self._timeout_s))

    def close(self) -> None:
        """End the store's process, if it is ours."""
        if self._server:
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)
            self._server = 0

    def _reach(self) -> TCPStore | None:
        address, port = self._topology.master_addr, self._topology.master_port
        reason, told = "", time.monotonic() + 10
        while time.monotonic() < self._deadline:
            if stop.waiting():
                return None
            try:
                socket.create_connection((address, port), timeout=2).close()
                return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=self._timeout_s))
            except OSError as error:
                reason = error.strerror or str(error)
            if time.monotonic() > told:
                print(f"waiting for the head node {address}:{port}: {reason}", flush=True)
                told = time.monotonic() + 10
            time.sleep(0.1)
        raise UserError(
            f"Node {self._topology.node_rank} could not reach the head node {address}:{port} within "
            f"{self._timeout_s:g} s: {reason}.",
            "check the address and that node 0 has started",
        )

    def _say_hello(self, store: Store) -> bool:
        nodes = range(self._topology.nnodes)
        hello = {"host": socket.gethostname(), "facts": self._facts}
        store.set(str(self._topology.node_rank), json.dumps(hello))
        while missing := [node for node in nodes if not store.check([str(node)])]:
            if stop.waiting():
                return False
            if time.monotonic() > self._deadline:
                names = ", ".join(map(str, missing))
                raise UserError(
                    f"Of {len(nodes)} nodes, these did not arrive within {self._timeout_s:g} s: {names}.",
                    "look at their logs, or allow more with --rendezvous-timeout-s",
                )
            time.sleep(0.05)
        greetings = {node: json.loads(store.get(str(node))) for node in nodes}
        self.hosts = {node: greeting["host"] for node, greeting in greetings.items()}
        self._compare({node: greeting["facts"] for node, greeting in greetings.items()})
        return True

    def _compare(self, facts: dict[int, dict[str, Any]]) -> None:
        for node, theirs in facts.items():
            for name, value in facts[0].items():
                if theirs.get(name) != value:
                    raise UserError(
                        f"Nodes differ in {name}: node 0 has {value}, node {node} ({self.hosts[node]}) "
                        f"has {theirs.get(name)}.",
                        "start all nodes from one image with one command",
                    )


def _serve(topology: Topology, timeout_s: float, writer: int) -> NoReturn:
    """Body of the store's process: listen, tell the port or the error, and stay until the agent ends."""
    stop.die_with_parent()
    for number in (*stop.STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        address = topology.master_addr if topology.master_port else "localhost"
        wait = timedelta(seconds=timeout_s)
        store = TCPStore(address, topology.master_port, is_master=True, wait_for_workers=False, timeout=wait)
        answer = str(store.port)
    except DistError as error:
        answer = str(error)
    with os.fdopen(writer, "w") as out:
        out.write(answer)
    while True:
        signal.pause()
