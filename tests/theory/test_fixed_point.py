"""Where the flow ends: Theorem 2, the rate of getting there, and the steps for which it gets there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow import federated_flow
from fedtangent._src.theory.prior import covariance_terms

from ..nightly import nightly
from .conftest import SIZES, square

ROUNDS = 40  # of the runs whose clients are of SIZES, so that they share their compiled programs
SCHEDULES = {
    "full participation": lambda maker: square(maker, SIZES, maker.everyone(SIZES, ROUNDS), 1),
    "permutations, K = 5": lambda maker: square(maker, SIZES, maker.permutations(SIZES, ROUNDS, 5), 5),
    "strata, partial participation": lambda maker: square(maker, [2] * 12, maker.strata(12, 60, 3, 3, 2), 3),
}
LONG = 6000  # rounds: more than any of them needs


def relative(value, reference) -> float:
    return float(np.linalg.norm(np.asarray(value) - reference) / np.linalg.norm(reference))


def everyone(maker):
    return SCHEDULES["full participation"](maker)


@pytest.mark.parametrize("schedule", nightly(SCHEDULES, ["strata, partial participation"]))
def test_fixed_point_is_theorem_2_and_long_runs_arrive_at_the_predicted_rate(maker, schedule):
    run = SCHEDULES[schedule](maker)
    flow, num_rounds = run.flow(), len(run.client)
    limit = gp_limit(run.blocks, run.y)
    assert limit.jitter == 0
    for model in range(run.num_models):
        end = flow.fixed_point(model)
        assert relative(end.mean, limit.mean) < 1e-8
        assert relative(end.cov, limit.cov) < 1e-8
        assert flow.contraction(model) < 1
    # the comparison can fail: cross terms matter
    terms = covariance_terms(run.blocks, run.blocks.ntk_test_train @ np.linalg.inv(run.blocks.ntk_train))
    assert relative(terms.prior + terms.propagated, limit.cov) > 0.1
    rate = flow.contraction()
    passes = int(np.ceil(np.log(1e-11) / np.log(rate)))
    flow = repeated(run, LONG // num_rounds).flow()
    assert flow.num_rounds == LONG >= passes * num_rounds
    middle, end = passes // 2 * num_rounds, passes * num_rounds
    rounds = [num_rounds, middle, middle + num_rounds, end]
    once, halfway, _, last = flow.mean(rounds, 0)
    assert relative(once, limit.mean) > 1e-4  # a run itself has not reached its fixed point
    assert relative(halfway, limit.mean) > 1e-8  # nor was it there all along
    reached = flow.limit_distance(end, 0, limit)
    assert reached == (relative(last, limit.mean), relative(flow.cov(end, 0), limit.cov))
    assert max(reached) < 1e-8
    measured = np.linalg.norm(flow.residual(rounds, model=0), axis=(1, 2))
    assert abs(measured[2] / measured[1] - rate) < 0.01 * rate


def repeated(run, times: int):
    tiled = {part: np.tile(getattr(run, part), (times, 1)) for part in ("client", "model", "weight")}
    return replace(run, rates=np.tile(run.rates, times), **tiled)


def test_a_client_never_asked_is_no_part_of_the_limit(maker):
    run = everyone(maker)
    limit = gp_limit(run.blocks, run.y)
    run = replace(run, weight=run.weight * (np.arange(6) != 4))
    flow = run.flow()
    seen = np.concatenate([rows for i, rows in enumerate(run.clients) if i != 4])
    k = run.blocks
    of_seen = KernelBlocks(
        k.ntk_train[np.ix_(seen, seen)], k.ntk_test_train[:, seen], k.nngp_train[np.ix_(seen, seen)],
        k.nngp_test_train[:, seen], k.nngp_test, k.ntk_test,
    )  # fmt: skip
    expected, end = gp_limit(of_seen, run.y[seen]), flow.fixed_point()
    assert relative(end.mean, expected.mean) < 1e-8
    assert relative(end.cov, expected.cov) < 1e-8
    assert relative(end.mean, limit.mean) > 1e-2
    assert flow.spectrum().constants == len(run.clients[4])


def test_a_nearly_singular_kernel_has_no_fixed_point_in_float64(maker):
    run = everyone(maker)
    nearly = run.train.copy()
    nearly[1] = nearly[0] + 1e-6 * nearly[1]
    with pytest.raises(SingularKernelError, match="not unique"):
        replace(run, train=nearly).flow().fixed_point()


@pytest.mark.parametrize(("steps", "server"), [(1, 1.0), (4, 1.0), (3, 1.5), (4, 1.5), (3, 3.0), (4, 3.0), (1, 2.0)])
def test_stability_bound_is_tight_for_one_client(maker, steps, server):
    def radius(factor):
        rates = np.full(2, bound * factor)
        flow = run.flow(local_steps=steps, learning_rate=rates, server_learning_rate=server)
        assert flow.stability().stable == (factor < 1)
        return flow.contraction()

    run = maker.run([24], maker.everyone([24], 2), 1)
    bound = run.flow(local_steps=steps, learning_rate=1.0, server_learning_rate=server).stability()
    bound = bound.max_stable_learning_rate
    assert radius(0.98) < 1 < radius(1.02)


def test_stability_is_sufficient_for_many_clients_and_names_the_worst(maker):
    run = everyone(maker)
    found = run.flow().stability()
    worst = int(np.argmin(found.client_bounds))
    own = run.train[run.clients[worst]]
    assert found.max_stable_learning_rate == pytest.approx(2 * len(own) / np.linalg.norm(own, 2) ** 2, rel=1e-12)
    flow = replace(run, rates=np.full(ROUNDS, 0.999 * found.max_stable_learning_rate)).flow()
    assert flow.stability().stable and flow.contraction() < 1
    idle = replace(run, weight=run.weight * (np.arange(6) != worst))
    assert idle.flow().stability().client_bounds[worst] == np.inf


def test_limit_of_couplings_between_outputs(maker):
    """outputs="full" with a Kronecker kernel is outputs="shared"."""
    run = maker.run(SIZES, maker.everyone(SIZES, 10), 1)
    full = type(run.blocks)(*(np.kron(block, np.eye(2)) for block in run.blocks))
    limit, wide = gp_limit(run.blocks, run.y), gp_limit(full, run.y, outputs="full")
    assert relative(wide.mean, limit.mean) < 1e-12
    assert relative(wide.cov, np.kron(limit.cov, np.eye(2))) < 1e-10
    flow = federated_flow(full, *run.problem[1:], run.rule(), outputs="full")
    assert relative(flow.mean(10), run.flow().mean(10)) < 1e-12
    assert relative(flow.fixed_point().mean, limit.mean) < 1e-8
