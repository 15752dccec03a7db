"""Training with several processes: the ranks' communication, and a step divided among them.

The result is that of one process in every bit; docs/distributed.md tells how, and what it costs.
"""

from mojolearn.distributed._agreement import agree, on_root, require_agreement
from mojolearn.distributed._comm import Comm, Traffic
from mojolearn.distributed._costs import Network, RankCost, predicted_seconds, step_costs
from mojolearn.distributed._local import LocalComm, run_ranks
from mojolearn.distributed._mpi import MPIComm, launched_ranks
from mojolearn.distributed._parallel import DataParallel
from mojolearn.distributed._plan import Division, ParameterBlocks, divide_rows

__all__ = [
    "Comm",
    "DataParallel",
    "Division",
    "LocalComm",
    "MPIComm",
    "Network",
    "ParameterBlocks",
    "RankCost",
    "Traffic",
    "agree",
    "divide_rows",
    "launched_ranks",
    "on_root",
    "predicted_seconds",
    "require_agreement",
    "run_ranks",
    "step_costs",
]
