"""What the comparisons of NTK-FL with its baselines share: their sizes, grids and seeds, at each scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtangent.experiments.lab.trials import check_numbers

METHODS = ("centralised", "ntk_fl", "ntk_fl_cross_entropy", "data_sharing", "fed_nova", "fed_avg")
COMPRESSED = ("cp_ntk_fl", "cp_ntk_fl_cross_entropy", "cp_fed_avg", "fed_com", "qsgd")
PARTITIONS = ("dirichlet", "writers", "shifted")
# The paper's grids (appendix A; section 6).
PAPER_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
PAPER_STEPS = (1, 3, 5, 7, 9, 10, 20, 30, 40, 50)
PAPER_TIMES = tuple(range(100, 2001, 100))


@dataclass(frozen=True)
class Settings:
    """Everything that the methods of one comparison share."""

    methods: tuple[str, ...] = METHODS
    partition: str = "dirichlet"  # of PARTITIONS
    alpha: float = 0.5
    num_clients: int = 300
    clients_per_round: int = 20
    num_rounds: int = 50
    reference_rounds: int = 100  # of FedAvg, whose accuracy then is what the others are to reach
    window: int = 5  # evaluations whose mean is "the accuracy after" a round: single ones swing
    width: int = 100
    last_w_std: float = 0.1  # of the last layer's initial weights times sqrt(width): the network starts near zero
    batch_size: int = 200
    loss: str = "cross_entropy"  # of the gradient methods; that of NTK-FL is in its name
    learning_rates: tuple[float, ...] = PAPER_RATES
    tangent_rates: tuple[float, ...] = PAPER_RATES
    local_steps: tuple[int, ...] = PAPER_STEPS
    server_steps: tuple[int, ...] = (20, 100, 300)  # of the centralised baseline in a round; the paper leaves them open
    times: tuple[int, ...] = PAPER_TIMES
    momentum: float = 0.9  # of FedNova's clients
    shared: float = 0.1  # size of data sharing's global set, as a share of all clients' examples
    beta: float = 1.0  # share of its examples that a client of the cp_ methods uses in a round
    projected: int = 0  # d1', dimensions of the random projection of the cp_ methods; 0: none
    sparsity: float = 0.0  # share of each example's Jacobian that CP-NTK-FL leaves out
    value_bits: int = 0  # of a Jacobian's number on CP-NTK-FL's wire; 0: those of the parameters
    tuning_rounds: int = 20
    tuning_seed: int = 1000
    num_train: int = 0
    num_validation: int = 2000
    num_test: int = 0


DIGITS = Settings(
    num_clients=50,
    clients_per_round=10,
    num_rounds=20,
    reference_rounds=40,
    batch_size=20,
    learning_rates=(0.01, 0.03, 0.1, 0.3),
    tangent_rates=(0.01, 0.03, 0.1),
    local_steps=(1, 5, 10, 20),
    server_steps=(10, 100),
    times=(100, 200, 400, 800, 1400, 2000),
    tuning_rounds=10,
    num_validation=237,
)
IMAGES = Settings(
    num_clients=60,
    clients_per_round=10,
    num_rounds=12,
    reference_rounds=24,
    batch_size=50,
    learning_rates=(0.01, 0.03, 0.1),
    tangent_rates=(0.01, 0.03, 0.1),
    local_steps=(1, 5, 20),
    server_steps=(20, 100),
    times=(100, 200, 400, 800, 1400, 2000),
    tuning_rounds=8,
    num_train=3000,
    num_validation=1000,
    num_test=2000,
)


def check(s: Settings) -> None:
    """Raise ``ValueError`` for settings out of range."""
    counts = ("num_clients", "clients_per_round", "num_rounds", "reference_rounds", "window", "width", "batch_size")
    check_numbers(s, (*counts, "tuning_rounds", "num_validation"))
    check_numbers(s, ("num_train", "num_test", "projected", "tuning_seed", "value_bits"), least=0)
    _check_names(s)
    for name in ("learning_rates", "tangent_rates"):
        rates = getattr(s, name)
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"{name}: got {rates}, must be one or more positive numbers")
    for name in ("local_steps", "server_steps", "times"):
        values = getattr(s, name)
        if not values or min(values) < 1 or list(values) != sorted(set(values)):
            raise ValueError(f"{name}: got {values}, must be one or more increasing whole numbers of at least 1")
    for name in ("shared", "beta"):
        if not 0 < getattr(s, name) <= 1:
            raise ValueError(f"{name}: got {getattr(s, name)}, must be above 0 and at most 1")
    for name in ("momentum", "sparsity"):
        if not 0 <= getattr(s, name) < 1:
            raise ValueError(f"{name}: got {getattr(s, name)}, must be from 0 to below 1")
    if s.last_w_std < 0:
        raise ValueError(f"last_w_std: got {s.last_w_std}, must be 0 or more")
    if s.clients_per_round > s.num_clients:
        raise ValueError(f"clients_per_round: got {s.clients_per_round}, there are {s.num_clients} clients")
    if s.window > min(s.num_rounds, s.reference_rounds):
        raise ValueError(f"window: got {s.window}, must be at most num_rounds and reference_rounds")


def _check_names(s: Settings) -> None:
    for one in s.methods:
        if one not in (*METHODS, *COMPRESSED):
            raise ValueError(f"methods: got {one!r}, allowed are {', '.join((*METHODS, *COMPRESSED))}")
    if len(set(s.methods)) < len(s.methods):
        raise ValueError(f"methods: got {', '.join(s.methods)}, must be different")
    for name, allowed in (("partition", PARTITIONS), ("loss", ("cross_entropy", "squared_error"))):
        if getattr(s, name) not in allowed:
            raise ValueError(f"{name}: got {getattr(s, name)!r}, allowed are {', '.join(allowed)}")
