"""Builds a ``Flow``: checks the arguments of ``federated_flow`` and converts them to the arrays of the recursion."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedtangent._src.checks import instance
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.kernels.large import LargeKernel
from fedtangent._src.losses import check_targets
from fedtangent._src.pytrees import on_device
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import in_float64, is_concrete
from fedtangent._src.theory.flow.clients import build_clients
from fedtangent._src.theory.flow.flow import Flow
from fedtangent._src.theory.flow.rounds import RunSlots, build_rounds, check_once
from fedtangent._src.theory.flow.rules import Rule, batch_places, check_normalisers, delays_of, read_rule
from fedtangent._src.types import ArrayLike, Cohort, Partition


@in_float64
def federated_flow(
    kernels: KernelBlocks | LargeKernel,
    y_train: ArrayLike,
    partition: Partition,
    cohorts: Cohort,
    rule: Rule,
    *,
    num_models: int | None = None,
    outputs: str = "shared",
) -> Flow:
    """Predicts every model after every round of federated training exactly, without training a network.

    The returned flow computes the mean and the covariance of a model's function over random initial functions, and the
    function that follows from a known initial function. Each client takes the rule's local steps from the server's
    model on ``1/(2 n_i) sum_j |f(x_j) - y_j|^2`` (FE-2024, eq. 9, summed over outputs), and the server replaces its
    model by the weighted average of the clients' models. The prediction assumes a model linear in its parameters: a
    linear model, a network linearised at its initial weights (with the empirical kernel), or a network of infinite
    width (with the analytic kernel; at width w the error is of order w^-1/2).

    Args:
        kernels: Kernel blocks of n training and m test points; the covariance needs the nngp blocks. With a
            ``LargeKernel`` the flow predicts the mean and runs from known initial functions, by products in float32,
            but no covariance.
        y_train: Targets [n, C].
        partition: Training rows of each of N clients; a row may belong to several clients.
        cohorts: Client, model and weight of every slot (place for a client in a round), [R, S] each. Weights are
            relative within a model and round; 0 marks an empty slot. A model without a slot in a round keeps its
            weights in that round.
        rule: Work of clients and server: ``Rule(local_steps, learning_rate)`` is FedAvg.
        num_models: Number K of models; by default one more than the largest model index in use.
        outputs: "shared", one [n, n] kernel for all outputs; or "full", [n C, n C] in example-major order.

    Returns:
        The flow. With ``jax_enable_x64`` it is differentiable in every number of the rule and in the cohorts' weights;
        kernels, targets and indices must be known numbers.

    Raises:
        ValueError: Shapes that do not fit; indices out of range; values not finite; local_steps < 1; a rate <= 0 (of
            several, one below 0); a client without examples in a slot, or twice for one model in a round of FedDyn or
            SCAFFOLD; an anchoring outside [0, 1]; kernels that are not symmetric and positive semidefinite; targets
            that the loss does not take; options that exclude each other; a traced call with 64-bit types off.

    Example, FedAvg on three clients, two of them in every round:

        >>> import numpy as np, fedtangent as ft
        >>> ft.enable_x64()
        >>> x, x_test = np.linspace(-1, 1, 12)[:, None], np.linspace(-1, 1, 5)[:, None]
        >>> clients = ft.partition.iid(12, num_clients=3, seed=0)
        >>> model = ft.models.mlp(1, 1, widths=(64,), activation="erf", dtype="float64")
        >>> kernels = ft.kernels.kernel_blocks(model.kernel, x, x_test)
        >>> two = ft.schedules.uniform_sampling(3, clients_per_round=2)
        >>> cohorts = ft.schedules.drawn_cohorts(two, clients, num_rounds=10, seed=0)
        >>> rule = ft.theory.Rule(local_steps=5, learning_rate=0.1)
        >>> flow = ft.theory.federated_flow(kernels, np.sin(3 * x), clients, cohorts, rule)
        >>> flow.mean(10).shape, flow.cov(10).shape  # of model 0 .. K - 1 at the five test points, after ten rounds
        ((1, 5, 1), (1, 5, 5))
    """
    for name, value, of in (("partition", partition, Partition), ("cohorts", cohorts, Cohort), ("rule", rule, Rule)):
        instance(name, value, of)
    targets = checks.check_rows("y_train", y_train, "n, C")
    if isinstance(kernels, LargeKernel):
        kernels = checks.check_large(kernels, len(targets), outputs, rule.dynamics)
    else:
        instance("kernels", kernels, KernelBlocks)
        kernels = checks.check_blocks(kernels, targets.shape, outputs)
    partition = checks.check_partition(partition, len(targets))
    client, model, num_models = checks.check_cohorts(cohorts, np.asarray(partition.sizes), num_models)
    slots = RunSlots(client, model, checks.present_slots(cohorts))
    steps = checks.check_steps(rule.local_steps, partition.num_clients)
    each_round = rule.learning_rate, rule.server_learning_rate, rule.anchoring
    for name, rate in zip(("learning_rate", "server_learning_rate"), each_round[:2], strict=True):
        checks.check_rate(name, rate, len(client))
    checks.check_shares("anchoring", rule.anchoring, len(client))
    kind, numbers = read_rule(rule, steps, stepwise=isinstance(kernels, LargeKernel))
    check_targets(kind.loss, targets, "y_train")
    check_normalisers(rule, kind, numbers, steps, slots.trains(partition.num_clients))
    if kind.corrects and is_concrete(cohorts.weight):
        check_once(slots, kind.algorithm)

    kind = kind._replace(rows_per_example=targets.shape[1] if outputs == "full" else 1)
    batches = batch_places(rule, steps, partition, slots.client, slots.present)
    theta = kernels if isinstance(kernels, LargeKernel) else kernels.ntk_train
    clients = build_clients(theta, partition, steps, kind.rows_per_example, kind.stepwise)
    checks.check_own_blocks(clients.smallest_eigenvalue, clients.largest_eigenvalue)
    rounds = build_rounds(clients, slots, cohorts.weight, each_round, num_models)
    rounds = rounds._replace(batches=None if batches is None else jnp.asarray(batches))
    if (delays := delays_of(rule, kind, client.shape)) is not None:
        oldest = np.arange(len(client), dtype=np.int32)
        rounds = rounds._replace(delay=on_device(delays), oldest=on_device(oldest))
    placed = theta.ntk_train if isinstance(theta, LargeKernel) else on_device(theta)
    return Flow(kernels, targets, outputs, num_models, partition, slots, placed, clients, rounds, kind, numbers, steps)
