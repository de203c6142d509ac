"""Everything that can be found wrong before a process is started is found here."""

import dataclasses

from trainer import datasets, distributed, record
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.topology import Topology


def prepare(config: TrainConfig, topology: Topology) -> tuple[TrainConfig, Topology]:
    """Fill in what is decided on this node, and check data, devices, batch size and the run's folder.

    Raises UserError.
    """
    if topology.nproc_per_node is None:
        topology = dataclasses.replace(topology, nproc_per_node=distributed.count_devices(config) or 1)
    assert topology.nproc_per_node is not None
    distributed.check_devices(config, topology)
    if config.batch_size % topology.world_size:
        raise UserError(
            f"--batch-size {config.batch_size} (global) cannot be shared among {topology.world_size} ranks.",
            f"--batch-size {-(-config.batch_size // topology.world_size) * topology.world_size}",
        )
    datasets.check(config)
    if topology.node_rank == 0 and not topology.rank:
        config = dataclasses.replace(config, run_id=config.run_id or record.new_run_id(config))
        record.open_folder(config)
    return config, topology
