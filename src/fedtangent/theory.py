"""Theory of federated runs: what networks should do in training, computed without training any.

Nothing here imports the simulation, so that theory and simulation cannot share a mistake. A shape that does not fit, a
number that is out of range or not finite, and an unknown name raise a ``ValueError`` that names the argument, before
any work starts; the docstrings list further errors only.

Index of theorems. The papers are FE-2021 and FE-2024 (on Fed-ensemble), NTK-FL, Local-GD and DeepLin. The residual is
the difference between a model's outputs and the targets.

==========================  ======================================================================================
``gp_limit``                Theorem 2 of FE-2024 (Theorem 4.2 and eq. (17) of FE-2021): models trained to convergence
                            are draws of a Gaussian process with mean ``Theta(x, X) Theta(X, X)^-1 Y``, Theta the
                            tangent kernel and (X, Y) the training data
``covariance_terms``        the covariance of Theorem 2, and of any finite round, term by term
``prior_functions``         draws of initial functions of infinite width, for losses without a closed form
``theorem_1``               Theorem 1 of FE-2024 (Theorems 4.1, 9.1 of FE-2021): bounds of the residual and the weights'
                            movement, and which of the theorem's assumptions hold on given data
``corollary_1``             Corollary 1 of FE-2024, eq. (11) (Corollary 4.1 of FE-2021): the variance of the mean of K
                            models, k(x, x)/K after convergence (k: covariance of one), and at finite rounds
``corollary_4_1``           Corollary 4.1 of FE-2021, eq. (5): how often the mean of K models is far from the mean of
                            the Gaussian process
``decompose_laws``          bias and variance of an ensemble, eq. (10) of FE-2024 and (3) of FE-2021, in closed form,
                            from mean and covariance under each schedule (``ensemble_law``, ``ensemble_laws``);
                            ``decompose_runs`` measures them from repeated runs
``evidence_bound``          a lower bound of ln p(D), D the data, by a Gaussian mixture around K models: eq. (2),
                            (6)-(8) of FE-2021, (5)-(8) of FE-2024; ``mixture_entropy`` and ``separated_entropy``: the
                            mixture's entropy; ``kl_divergence``: its divergence from the posterior, eq. (2) of FE-2021;
                            ``mode_objective``: eq. (8) of FE-2021; ``linear_posterior``: the exact posterior of a
                            linear model
``exponential_product``     Lemma 9.2 of FE-2021, and ``exponential_average`` Lemma 9.3: second-order terms
``expansion``               how an age (rounds in which each client trains the model once) changes the residual: eq.
                            (13)-(14) of FE-2021, from ``age_operators``; ``condition_15`` is eq. (15)
``kappa_4``                 section 9.4 of FE-2021: the gap between a network and its linearisation;
                            ``linearisation_gap``: that section's last bound; ``gap_from_drift``: a bound by the
                            measured change of the tangent kernel
``ntk_theorem_1``           Theorem 1 of NTK-FL (Yue et al., ICML 2022): decay of the residual in t steps, and which of
                            the assumptions hold; ``ntk_theorem_2``: Theorem 2, in rounds of FedAvg
``ntk_evolution``           eq. (7) and (9a) of NTK-FL: how its server trains the model with the clients' kernel, in
                            the limit of infinite width; ``ntk_evolved``: for given initial functions
``neighbourhood_round``     a round of NTK-DFL (Thompson et al., ICML 2025) on the residuals of all clients' models
``weight_gap_bound``        Lemma 2 of NTK-FL: how far the weights of NTK-FL are from the weights of gradient descent;
                            ``undecided_bound``: Lemma 1, how many ReLUs switch; ``drift_bound``: Lemma 3, how far the
                            kernel changes; ``sampling_bound``: Lemma 4, how far a random network's kernel is from the
                            infinite-width kernel ``expected_kernel``, eq. (13)
``local_regression``        Lemma 1 of Local-GD, eq. (4)-(6): the global model of a linear regression after every round,
                            where it converges and how fast, (9); ``minimum_norm``: the centralised model (7);
                            ``local_theorem_1``: Theorem 1
``parallel_projections``    Lemmas 3 and 4 of Local-GD, eq. (13) and (16): global models of separable classification;
                            ``hard_margin``: eq. (15), with which Theorems 2 and 3 compare them; ``farkas``: a proof
                            that Assumption 1 fails on given data; ``exponential_models``: solves eq. (12), Lemma 2
``deep_linear_theorem``     Theorem IV.2 of DeepLin, eq. (18): decay of FedAvg's loss on deep linear networks, the
                            conditions, and hypotheses A, B and C of the proof; ``deep_linear_spectrum``: eigenvalues of
                            the initial kernel P(0), (14)
``residual_terms``          eq. (16) and (17) of DeepLin: the four terms of the residual after a round
``deep_linear_limit``       every round of FedAvg on deep linear networks of infinite width
``federated_flow``          mean and covariance of every round for any clients, schedule and ``Rule``: the dynamics
                            that eq. (13)-(16) in section 9.2 of FE-2021 approximate, without their remainder terms
``Flow.fixed_point``        where the dynamics converge, without following them: Theorem 2 of FE-2024 can be tested
``Flow.bias``               the fixed point minus that of Theorem 2, not 0 with weight decay or contradictory labels
``Flow.stability``          the step sizes for which the dynamics converge under every schedule;
                            ``Flow.largest_stable_learning_rate``: under the schedule of the run;
                            ``Flow.largest_stable_server_rate``: under random delays (FedAsync, FedBuff)
``private_flow``            DP-FedAvg (McMahan et al., 2018) in the kernel regime: the covariance that the server's
                            noise adds, draws of clipped runs, and the best rate and clipping bound for given noise
``conformal_coverage``      the coverage of federated conformal prediction (Lu et al., ICML 2023): its two bounds over
                            a mixture of clients
``predicted_loss``          eq. (10) of FE-2024 for the ensemble's prediction, differentiable in every number of a run;
                            ``best_learning_rate`` minimises it
==========================  ======================================================================================

FE-2021 and FE-2024 appeared on arXiv in 2021 and in IEEE TASE in 2024.
"""

from fedtangent._src.theory.conformal import CoverageBounds, conformal_coverage
from fedtangent._src.theory.deep_linear.gram import spectrum as deep_linear_spectrum
from fedtangent._src.theory.deep_linear.rounds import FullBatchWork, balancedness, full_batch_work, residual_terms
from fedtangent._src.theory.deep_linear.theorem import DeepLinearTheorem, deep_linear_limit, deep_linear_theorem
from fedtangent._src.theory.fed_ensemble.bias_variance import (
    corollary_1,
    decompose_laws,
    decompose_runs,
    ensemble_law,
    ensemble_laws,
)
from fedtangent._src.theory.fed_ensemble.convergence import (
    Networks,
    Theorem1,
    gap_from_drift,
    kappa_4,
    linearisation_gap,
    theorem_1,
    weight_movement,
)
from fedtangent._src.theory.fed_ensemble.limit import corollary_4_1, gp_limit
from fedtangent._src.theory.fed_ensemble.second_order import (
    age_operators,
    condition_15,
    expansion,
    exponential_average,
    exponential_product,
)
from fedtangent._src.theory.fed_ensemble.variational import (
    EvidenceBound,
    GaussianMixture,
    LinearPosterior,
    evidence_bound,
    kl_divergence,
    linear_posterior,
    mixture_entropy,
    mode_objective,
    separated_entropy,
)
from fedtangent._src.theory.flow import (
    Flow,
    PrivateFlow,
    Rule,
    best_learning_rate,
    federated_flow,
    predicted_loss,
    private_flow,
)
from fedtangent._src.theory.local_gd.max_margin import (
    FeasibleSets,
    direction_distance,
    exponential_models,
    farkas,
    feasible_sets,
    halpern,
    hard_margin,
    parallel_projections,
)
from fedtangent._src.theory.local_gd.regression import LocalRegression, local_regression, local_theorem_1, minimum_norm
from fedtangent._src.theory.ntk_fl.convergence import (
    NtkTheorem,
    TwoLayerStart,
    ntk_evolution,
    ntk_evolved,
    ntk_theorem_1,
    ntk_theorem_2,
)
from fedtangent._src.theory.ntk_fl.lemmas import (
    drift_bound,
    expected_kernel,
    sampling_bound,
    undecided_bound,
    weight_gap_bound,
)
from fedtangent._src.theory.ntk_fl.neighbours import neighbourhood_round
from fedtangent._src.theory.prior import covariance_terms, prior_functions

__all__ = [
    "CoverageBounds",
    "DeepLinearTheorem",
    "EvidenceBound",
    "FeasibleSets",
    "Flow",
    "FullBatchWork",
    "GaussianMixture",
    "LinearPosterior",
    "LocalRegression",
    "Networks",
    "NtkTheorem",
    "PrivateFlow",
    "Rule",
    "Theorem1",
    "TwoLayerStart",
    "age_operators",
    "balancedness",
    "best_learning_rate",
    "condition_15",
    "conformal_coverage",
    "corollary_1",
    "corollary_4_1",
    "covariance_terms",
    "decompose_laws",
    "decompose_runs",
    "deep_linear_limit",
    "deep_linear_spectrum",
    "deep_linear_theorem",
    "direction_distance",
    "drift_bound",
    "ensemble_law",
    "ensemble_laws",
    "evidence_bound",
    "expansion",
    "expected_kernel",
    "exponential_average",
    "exponential_models",
    "exponential_product",
    "farkas",
    "feasible_sets",
    "federated_flow",
    "full_batch_work",
    "gap_from_drift",
    "gp_limit",
    "halpern",
    "hard_margin",
    "kappa_4",
    "kl_divergence",
    "linear_posterior",
    "linearisation_gap",
    "local_regression",
    "local_theorem_1",
    "minimum_norm",
    "mixture_entropy",
    "mode_objective",
    "neighbourhood_round",
    "ntk_evolution",
    "ntk_evolved",
    "ntk_theorem_1",
    "ntk_theorem_2",
    "parallel_projections",
    "predicted_loss",
    "prior_functions",
    "private_flow",
    "residual_terms",
    "sampling_bound",
    "separated_entropy",
    "theorem_1",
    "undecided_bound",
    "weight_gap_bound",
    "weight_movement",
]
