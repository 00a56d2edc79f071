"""The exact federated kernel flow: every round of federated training of a linear, linearised or infinitely wide model.

Under squared loss a client's local steps move the function by ``-Theta(x, X_i) z_i`` with z_i linear in its residual
(see ``_local``), so the global model of every round keeps the form ``f_r(x) = f_0(x) - Theta(x, X) M_r (f_0(X) - Y)``;
for FedAvg ``M_{r+1} = M_r + S_r (I - Theta M_r)`` with S_r block-diagonal over the round's cohort. This is the exact,
discrete version of the dynamics that FE-2021 section 9.2 follows to second order in eq. (13)-(16). Weight decay shrinks
the initial function as well: ``f_r(x) = gamma_r f_0(x) - Theta(x, X) (A_r f_0(X) - M_r Y)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedtangent.kernels.gram import KernelBlocks
from fedtangent.theory import checks
from fedtangent.theory.flow.clients import build_clients
from fedtangent.theory.flow.flow import Flow, Slots
from fedtangent.theory.flow.rounds import build_rounds, normalised, twice
from fedtangent.theory.flow.rules import build_rule, check_normalisers
from fedtangent.theory.precision import in_float64, is_concrete, on_device
from fedtangent.types import Cohort, Partition


@in_float64
def federated_flow(
    k: KernelBlocks,
    y_train: Any,
    partition: Partition,
    cohorts: Cohort,
    local_steps: Any,
    learning_rate: Any,
    *,
    num_models: int | None = None,
    server_learning_rate: Any = 1.0,
    outputs: str = "shared",
    algorithm: str = "fed_avg",
    dynamics: str = "gradient_descent",
    prox: Any = 0.0,
    alpha: Any = None,
    weight_decay: Any = 0.0,
    homogeneity: Any = 1.0,
    server_momentum: Any = 0.0,
    nesterov: bool = False,
    step_weights: Any = None,
    batches: Sequence[Sequence[Any]] | None = None,
) -> Flow:
    """Exact prediction of every round of federated gradient descent on ``1/(2 n_i) sum_j |f(x_j) - y_j|^2``.

    The loss is FE-2024's eq. (9), summed over outputs; each client takes full-batch steps from the server's model, and
    the server replaces its model by the weighted average of its clients' (``server_learning_rate`` scales the move).
    Assumes a model linear in its parameters: a linear model, a network linearised at its initial weights (k its
    empirical kernel), or the limit of infinite width (k analytic; a network's error is of order width^-1/2).

    Args:
        k: kernel blocks of n training and m test points; the covariance needs the nngp blocks.
        y_train: [n, C] targets.
        partition: which training rows each of N clients holds; rows may belong to several clients.
        cohorts: client, model, weight of every slot, [R, S] each. Weights are relative within a model and round;
            0 marks an empty slot; a model without a slot does not move in that round.
        local_steps: steps T of gradient descent, an integer or one per client [N].
        learning_rate: step size, a number or one per round [R].
        num_models: K; by default one more than the largest model in use.
        server_learning_rate: step of the server, a number or one per round [R].
        outputs: "shared", one [n, n] kernel for all outputs; or "full", [n C, n C] in example-major order.
        algorithm: "fed_avg"; "fed_dyn" (Acar et al., 2021, algorithm 1, with its ``alpha``); "scaffold" (Karimireddy
            et al., 2020, algorithm 1, option II); "fed_nova" (Wang et al., 2020, eq. 6 and 7). The cohorts' weights
            are those of the clients' mean in each; FedDyn's and SCAFFOLD's papers have them uniform.
        dynamics: "gradient_descent", or "gradient_flow" for the time ``local_steps * learning_rate``.
        prox: mu of FedProx's ``mu / 2 |w - w_server|^2``.
        weight_decay: of the local objective, ``weight_decay / 2 |w|^2``.
        homogeneity: ``J(x) w_0 / f_0(x)``, for weight decay: 1 for a linear model.
        server_momentum: FedAvgM's, in [0, 1); ``nesterov`` looks ahead.
        step_weights: [T] factors of the local steps' sizes, T the largest of local_steps.
        batches: per client, for each of its local steps the training rows of that step's minibatch, the same in every
            round; the default is all of the client's. The gradient is the mean over the batch.

    Returns:
        Flow. Differentiable with respect to every rate and number of the rule and the cohorts' weights (with
        ``jax_enable_x64`` set); kernels, targets and indices must be known numbers.

    Raises:
        ValueError: shapes that do not fit; indices out of range; values not finite; local_steps < 1; a rate <= 0; a
            client without examples in a slot; options that exclude each other; float64 unavailable because the call is
            traced with 64-bit types off.
    """
    for name, value, kind in (
        ("k", k, KernelBlocks),
        ("partition", partition, Partition),
        ("cohorts", cohorts, Cohort),
    ):
        checks.check_kind(name, value, kind)
    targets = checks.check_targets(y_train)
    k = checks.check_blocks(k, targets.shape, outputs)
    partition = checks.check_partition(partition, len(targets))
    client, model, num_models = checks.check_cohorts(cohorts, np.asarray(partition.sizes), num_models)
    steps = checks.check_steps(local_steps, partition.num_clients)
    for name, rate in (("learning_rate", learning_rate), ("server_learning_rate", server_learning_rate)):
        checks.check_rate(name, rate, [(), (len(client),)])
    rule = build_rule(
        steps, partition, algorithm=algorithm, dynamics=dynamics, prox=prox, alpha=alpha, weight_decay=weight_decay,
        homogeneity=homogeneity, server_momentum=server_momentum, nesterov=nesterov, step_weights=step_weights,
        batches=batches,
    )  # fmt: skip
    present = checks.present_slots(cohorts)
    trains = np.zeros(partition.num_clients, bool)
    trains[client[present]] = True
    check_normalisers(rule, steps, learning_rate, trains)
    known = is_concrete(cohorts.weight)
    if known and algorithm in ("fed_dyn", "scaffold") and (again := twice(client, model, present)) is not None:
        raise ValueError(f"{algorithm} needs each client once per model and round, got client {again[1]} twice in "
                         f"round {again[0]}")  # fmt: skip

    width = targets.shape[1] if outputs == "full" else 1
    clients = build_clients(k.ntk_train, partition, steps, width, rule.batches)
    checks.check_blocks_semidefinite(clients.smallest_eigenvalue, clients.largest_eigenvalue)
    weight = normalised(model, jnp.asarray(cohorts.weight, jnp.float64), present, num_models)
    rates, server_rates = (
        jnp.broadcast_to(jnp.asarray(rate, jnp.float64), (len(client),))
        for rate in (learning_rate, server_learning_rate)
    )
    rounds = build_rounds(
        clients, partition.num_clients, client, model, present, weight, rates, server_rates, num_models
    )
    return Flow(
        k, targets, outputs, num_models, len(client), partition, Slots(client, model, present),
        on_device(k.ntk_train), clients, rounds, rule, steps,
    )  # fmt: skip
