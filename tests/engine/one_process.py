"""A short run over all devices of all processes, as JSON; ``test_distributed.py`` starts it.

python tests/engine/one_process.py DEVICES ALGORITHM,.. MAPPING ... [--coordinator ADDRESS --num-processes N
--process-id I]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from fedtangent._src.federated.ntk_fl import Evolution


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", type=int)
    parser.add_argument("algorithms")
    parser.add_argument("mappings", nargs="+")
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    return parser.parse_args()


def runs(mapping: str, names: str, toys: Any) -> dict[str, Any]:
    """Algorithms under ``mapping`` on the small problem of ``toys``: final weights, the infos' examples, bytes."""
    import jax
    import numpy as np

    from fedtangent import simulate
    from fedtangent._src.engine import Devices, Evaluation
    from fedtangent._src.federated import algorithms
    from fedtangent._src.federated.local import Work
    from fedtangent._src.federated.schedule import best_fitting, per_client_permutations, strata
    from fedtangent._src.types import Algorithm

    def fed_ensemble() -> Algorithm:
        work = Work(epochs=2, batch_size=2)
        return algorithms.fed_ensemble(toys.two_layer(), strata(6, 3, 4), client_learning_rate=0.2, work=work)

    def ntk_fl() -> Algorithm:
        return algorithms.ntk_fl(
            toys.two_layer(), per_client_permutations(6, 2), learning_rate=0.3, evolution=Evolution(times=(1, 4))
        )

    def fed_avg() -> Algorithm:
        work = Work(epochs=1, batch_size=2)
        return algorithms.fed_avg(toys.two_layer(), best_fitting(6, 2, 5), client_learning_rate=0.2, work=work)

    built, found = {"fed_ensemble": fed_ensemble, "ntk_fl": ntk_fl, "fed_avg": fed_avg}, {}
    for algorithm in (built[name]() for name in names.split(",")):
        run = simulate(
            algorithm, toys.uneven_data(), num_rounds=6, seed=4, evaluation=Evaluation(4), devices=Devices(mapping)
        )
        weights = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.state.server)])
        found[f"{mapping} {algorithm.name}"] = {
            "weights": weights.tolist(),
            "examples": run.history.rounds["examples"].tolist(),
            "uplink": run.history.evaluations[-1].uplink_bytes,
        }
    return found


def main() -> None:
    arguments = parsed()
    flag = f"--xla_force_host_platform_device_count={arguments.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    sys.path[:0] = [str(Path(__file__).parents[1] / "federated"), str(Path(__file__).parent)]

    import jax
    import toys
    from slot_loop import FOLDS, assert_by_hand, mapped

    from fedtangent import enable_x64
    from fedtangent._src.engine import processes
    from fedtangent._src.engine.clients import device_mesh, scan_clients, sharded

    enable_x64()
    if arguments.num_processes:
        processes.start(arguments.coordinator, arguments.num_processes, arguments.process_id)
    for fold in FOLDS:
        assert_by_hand(mapped(sharded(scan_clients, device_mesh(jax.device_count())), fold), fold)
    found = {n: run for mapping in arguments.mappings for n, run in runs(mapping, arguments.algorithms, toys).items()}
    if processes.is_main():
        print(json.dumps({"devices": jax.device_count(), "processes": jax.process_count(), "runs": found}))


if __name__ == "__main__":
    main()
