"""Federated training of a linear model, step by step in weight space: what the theory is compared with.

Plain NumPy, written from the papers' algorithms (FE-2021 Algorithm 1, FE-2024 Algorithm 1, local loss eq. 9); it knows
nothing of kernels, operators or recursions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow import Flow, Rule, federated_flow
from fedtangent._src.types import Cohort, Partition

from ..nightly import nightly


@dataclass(frozen=True)
class LinearRun:
    """K linear models ``f(x) = phi(x) w`` trained by N clients for R rounds; ``w0 ~ N(0, diag(prior))``."""

    train: np.ndarray  # [n, P] features
    test: np.ndarray  # [m, P]
    y: np.ndarray  # [n, C]
    prior: np.ndarray  # [P] variances of the initial weights
    clients: tuple[np.ndarray, ...]  # rows of each client
    client: np.ndarray  # [R, S]
    model: np.ndarray  # [R, S]
    weight: np.ndarray  # [R, S]
    steps: np.ndarray  # [N]
    rates: np.ndarray  # [R]
    num_models: int
    server: float = 1.0

    @property
    def blocks(self) -> KernelBlocks:
        scaled = self.train * self.prior
        return KernelBlocks(
            ntk_train=self.train @ self.train.T,
            ntk_test_train=self.test @ self.train.T,
            nngp_train=scaled @ self.train.T,
            nngp_test_train=self.test @ scaled.T,
            nngp_test=(self.test * self.prior) @ self.test.T,
            ntk_test=self.test @ self.test.T,
        )

    @property
    def partition(self) -> Partition:
        offsets = np.cumsum([0] + [len(rows) for rows in self.clients])
        return Partition(np.concatenate(self.clients).astype(np.int32), offsets.astype(np.int32))

    @property
    def cohorts(self) -> Cohort:
        return Cohort(self.client, self.model, self.weight)

    @property
    def problem(self) -> tuple:
        return self.blocks, self.y, self.partition, self.cohorts

    def rule(self, **options) -> Rule:
        return Rule(**{"local_steps": self.steps, "learning_rate": self.rates, **options})

    def flow(self, num_models: int | None = None, outputs: str = "shared", **options) -> Flow:
        """What the theory says of the run; ``options`` change the rule."""
        rule = self.rule(**{"server_learning_rate": self.server, **options})
        return federated_flow(*self.problem, rule, num_models=num_models or self.num_models, outputs=outputs)

    def weights(self, model: int, w0: np.ndarray, y: np.ndarray | None = None) -> list[np.ndarray]:
        """The model's weights [P, C] after 0, 1, .. R rounds."""
        y = self.y if y is None else y
        path = [np.array(w0)]
        for r in range(len(self.client)):
            server = path[-1]
            mine = [s for s in range(self.client.shape[1]) if self.model[r, s] == model and self.weight[r, s] > 0]
            total = sum(self.weight[r, s] for s in mine)
            move = np.zeros_like(server)
            for s in mine:
                rows = self.clients[self.client[r, s]]
                local = server.copy()
                for _ in range(self.steps[self.client[r, s]]):
                    error = self.train[rows] @ local - y[rows]
                    local = local - self.rates[r] / len(rows) * self.train[rows].T @ error
                move += self.weight[r, s] / total * (local - server)
            path.append(server + self.server * move)
        return path

    def weight_maps(self, model: int) -> list[np.ndarray]:
        """L_r [P, P] with ``w_r = L_r w_0 + constant``, by running the loop on every basis vector without labels."""
        size = self.train.shape[1]
        return self.weights(model, np.eye(size), np.zeros((len(self.train), size)))

    def covariance(self, model: int, r: int) -> np.ndarray:
        """Covariance of f_r at the test points, [m, m]."""
        root = self.test @ self.weight_maps(model)[r] * np.sqrt(self.prior)
        return root @ root.T


@dataclass(frozen=True)
class Maker:
    """Random linear runs; all have 24 training rows, 5 test rows, 40 features and 2 outputs unless asked otherwise.

    Programs are compiled once for each shape: runs that may have the same sizes, rounds, slots and models do.
    """

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20))

    def clients(self, sizes: list[int], n: int) -> tuple[np.ndarray, ...]:
        rows = self.rng.permutation(n)
        return tuple(np.split(rows[: sum(sizes)], np.cumsum(sizes)[:-1]))

    def run(
        self, sizes: list[int], cohorts: tuple, num_models: int, n: int = 24, points: int = 5, **changes
    ) -> LinearRun:
        client, model, weight = cohorts
        size = 40 if n <= 24 else n + 20
        features = self.rng.standard_normal((n + points, size)) / np.sqrt(size)
        plain = LinearRun(
            train=features[:n],
            test=features[n:],
            y=self.rng.standard_normal((n, 2)),
            prior=self.rng.uniform(0.2, 3.0, size),
            clients=self.clients(sizes, n),
            client=client,
            model=model,
            weight=weight,
            steps=np.full(len(sizes), 4),
            rates=np.full(len(client), 0.9),
            num_models=num_models,
        )
        return replace(plain, **changes)

    def everyone(self, sizes: list[int], rounds: int) -> tuple:
        """FedAvg with full participation: one model, weights by examples."""
        shape = (rounds, len(sizes))
        return (
            np.tile(np.arange(len(sizes)), (rounds, 1)),
            np.zeros(shape, int),
            np.tile(np.array(sizes, float), (rounds, 1)),
        )

    def permutations(self, sizes: list[int], rounds: int, num_models: int) -> tuple:
        """FE-2024 Algorithm 1: every age of K rounds, each client trains the K models in an order of its own."""
        client, _, weight = self.everyone(sizes, rounds)
        ages = -(-rounds // num_models)
        orders = [[self.rng.permutation(num_models) for _ in sizes] for _ in range(ages)]
        model = np.array(
            [[orders[r // num_models][i][r % num_models] for i in range(len(sizes))] for r in range(rounds)]
        )
        return client, model, weight

    def strata(self, num_clients: int, rounds: int, num_models: int, num_strata: int, per_stratum: int) -> tuple:
        """FE-2021 Algorithm 1: strata take turns at the models by a Q x K permutation table; clients sampled."""
        members = np.split(self.rng.permutation(num_clients), num_strata)
        client, model = [], []
        for r in range(rounds):
            if r % num_models == 0:
                table = [self.rng.permutation(num_models) for _ in range(num_strata)]
            chosen = [self.rng.choice(stratum, per_stratum, replace=False) for stratum in members]
            client.append(np.concatenate(chosen))
            model.append(np.repeat([order[r % num_models] for order in table], per_stratum))
        return np.array(client), np.array(model), np.ones((rounds, num_strata * per_stratum))


@pytest.fixture
def maker() -> Maker:
    return Maker()


SIZES = [3, 1, 5, 2, 7, 6]


def square(maker: Maker, sizes: list[int], cohorts: tuple, num_models: int, n: int = 24, **changes) -> LinearRun:
    """As many test rows as training rows: predictions at both are one compiled program."""
    return maker.run(sizes, cohorts, num_models, n, n, **changes)


def permuted(maker: Maker, **changes) -> LinearRun:
    """Three models under permutations, ten rounds."""
    return square(maker, SIZES, maker.permutations(SIZES, 10, 3), 3, **changes)


def _overlapping(maker: Maker) -> LinearRun:
    return permuted(maker, clients=tuple(maker.rng.choice(24, size, replace=False) for size in SIZES))


def _empty_slots(maker: Maker) -> LinearRun:
    """Some slots empty (holding nonsense), and model 1 without a client in rounds 3 and 4."""
    client, model, weight = maker.permutations(SIZES, 10, 3)
    weight = weight * (maker.rng.uniform(size=weight.shape) < 0.7)
    weight[3:5] *= model[3:5] != 1
    client, model = np.where(weight == 0, -7, client), np.where(weight == 0, 99, model)
    return square(maker, SIZES, (client, model, weight), 3)


CASES = {
    "everyone": lambda maker: square(maker, SIZES, maker.everyone(SIZES, 10), 1),
    "permutations": permuted,
    "strata": lambda maker: square(maker, [2] * 12, maker.strata(12, 10, 3, 3, 2), 3),
    "rates and steps": lambda maker: permuted(
        maker, rates=0.9 * 0.8 ** np.arange(10), steps=np.array([1, 9, 4, 2, 30, 3]), server=0.7
    ),
    # a step so large that every local eigenvalue overshoots (1 - x < 0), yet stable
    "overshooting": lambda maker: square(maker, [1] * 6, maker.everyone([1] * 6, 10), 1, rates=np.full(10, 1.5)),
    "overlapping": _overlapping,
    "empty slots": _empty_slots,
    # three buckets of sizes
    "very uneven": lambda maker: square(maker, [1, 40, 75], maker.everyone([1, 40, 75], 10), 1, n=116),
}


@pytest.fixture(params=nightly(CASES, [name for name in CASES if name not in ("everyone", "strata")]))
def linear_run(request: pytest.FixtureRequest) -> LinearRun:
    """One federated run of each kind; by day everyone takes part where steps overshoot and sizes differ.

    By day others take turns at the models in permutations.
    """
    return CASES[request.param](Maker())
