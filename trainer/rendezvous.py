"""Static rendezvous: the head listens, every node knows its index, and whoever is missing is named.

Differs from torch's own static handler in what it says: a port in use, a head that cannot be reached, nodes that did
not arrive, and nodes that run something else are one-line errors, not stack traces after ten silent minutes.
"""

import json
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore
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
        port = self._topology.master_port
        try:
            return TCPStore(
                "localhost" if not port else self._topology.master_addr,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._timeout_s),
            )
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error) and "in use" not in str(error):
                raise
            hint = "another PET_MASTER_PORT (--master-port of the launcher), or end the run that holds it"
            raise UserError(f"Port {port} of the head node is in use.", hint) from None

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
