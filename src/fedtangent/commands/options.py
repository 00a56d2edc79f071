"""Options of ``fedtangent train``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainOptions:
    """One federated run: data, partition, model, algorithm. `fedtangent list` names the choices."""

    algorithm: str = "fed_avg"
    """fed_avg, fed_ensemble or ntk_fl."""
    dataset: str = "digits"
    """digits, sine, mnist or fashion_mnist."""
    partition: str = "dirichlet"
    """iid, shards, classes, dirichlet, by_user or quantity_skew."""
    model: str = "mlp"
    """mlp or rbf_linear."""
    num_rounds: int = 50
    """Communication rounds R."""
    num_clients: int = 20
    """Clients N (by_user: as many as users)."""
    alpha: float = 0.5
    """Dirichlet concentration: smaller is more heterogeneous."""
    min_client_size: int = 1
    """Fewest examples of a client."""
    shards_per_client: int = 2
    """Shards of a client, for the partition shards."""
    classes_per_client: int = 2
    """Classes of a client, for the partition classes."""
    num_train: int | None = None
    """Use only the first so many training examples."""
    schedule: str = "default"
    """all, uniform, permutations, strata, random; default: the algorithm's own."""
    num_models: int = 5
    """Models K of the ensemble (schedules all, permutations, strata, random)."""
    clients_per_round: int | None = None
    """Cohort of the schedule uniform (default: everyone)."""
    num_strata: int = 5
    """Strata Q of the schedule strata."""
    clients_per_stratum: int | None = None
    """Clients drawn from each stratum (default: all of it)."""
    widths: tuple[int, ...] = (128,)
    """Hidden widths of the mlp."""
    activation: str = "relu"
    """Activation of the mlp."""
    parameterization: str = "ntk"
    """ntk or standard parameterisation of the mlp."""
    loss: str = "squared_error"
    """squared_error (classes as centred one-hot targets) or cross_entropy."""
    client_learning_rate: float = 1.0
    """Step size of the clients; of the evolution, for ntk_fl."""
    server_learning_rate: float = 1.0
    """Step size of the server."""
    local_steps: int | None = None
    """Local steps T (give this or --local-epochs)."""
    local_epochs: int | None = None
    """Local epochs (default: 5, unless --local-steps is given)."""
    batch_size: int = 16
    """Minibatch size; 0 for full batches."""
    weighting: str = "examples"
    """Weigh clients by examples or uniformly: examples, uniform."""
    ntk_kernel: str = "averaged"
    """ntk_fl: averaged (the paper's H for all outputs) or exact."""
    ntk_times: tuple[int, ...] = tuple(range(100, 2001, 100))
    """ntk_fl: candidate numbers of gradient steps."""
    evaluate_every: int = 5
    """Rounds between evaluations."""
    mapping: str = "auto"
    """How clients are mapped onto the device: auto, scan, vmap."""
    seed: int = 0
    """Seed of everything."""
    output: Path = Path("results/train")
    """Folder for config.json, metrics.csv, result.json and figures/."""
    data_dir: Path | None = None
    """Folder with original data files (default: $FEDTANGENT_DATA)."""
