"""Errata of the five papers: every formula and statement that is built otherwise here than the paper prints it.

Docstrings name a row by its key, as in "erratum `fe2021.18`"; ``docs/errata.md`` is made of this table.
"""

from __future__ import annotations

from typing import NamedTuple


class Erratum(NamedTuple):
    """One place of a paper.

    Attributes:
        key: Name of the row: the paper, and the place in short.
        place: The place in the paper.
        printed: What the paper has.
        right: What it should have, or what is built here.
        shown: Theorem check or test (``file::name``) that computes with ``right``.
        fails: Whether ``shown`` also shows that ``printed`` fails; otherwise the erratum was found by reading.
    """

    key: str
    place: str
    printed: str
    right: str
    shown: str
    fails: bool = True

    @property
    def paper(self) -> str:
        """Short name of the paper."""
        return PAPER_OF[self.key.partition(".")[0]]


PAPER_OF = {
    "fe2021": "FE-2021",
    "fe2024": "FE-2024",
    "ntk_fl": "NTK-FL",
    "local_gd": "Local-GD",
    "deep_linear": "DeepLin",
}
_CONVERGENCE = "tests/theory/test_convergence.py::"
_NTK = "tests/theory/test_ntk_convergence.py::"
_ERRATA = "tests/test_errata.py::"
_E = Erratum

ERRATA = (
    _E("fe2024.4", "eq. (4)", "weights minimise the weighted loss plus gamma times the entropy and are exp(-gamma "
       "loss), normalised; a small gamma favours models of low loss", "minus gamma times the entropy, and exp(-loss / "
       "gamma): only these agree with each other and with the text",
       "tests/federated/test_personal.py::test_weighted_models_equal_the_formula"),
    _E("fe2024.10", "eq. (10), second term", "ybar - h", "ybar - hbar, as in FE-2021 (3); else the two sides differ by "
       "the variance", _ERRATA + "test_the_decomposition_has_the_mean_prediction_in_its_bias"),
    _E("fe2024.theorem1", "Theorem 1 (FE-2021, Theorem 4.1)", "the squared error is below e^(-eta_0 lambda t / (3 "
       "nbar)), t rounds times local steps", "e^(-2 eta_0 lambda t / (3 K nbar)), which 9.1 proves: each model sees "
       "every client once in K rounds; the printed rate is above the first-order one for K > 6",
       "fed_ensemble.convergence"),
    _E("fe2024.remainder", "Theorems 1 and 2 (FE-2021, 4.1, 4.2 and 9.1)", "up to a remainder o(eta_0^2)",
       "no remainder for a linear model or infinite width: the fixed point of a stable step is Theorem 2's limit",
       "tests/theory/test_fixed_point.py::test_fixed_point_is_theorem_2_and_long_runs_arrive_at_the_predicted_rate",
       False),
    _E("fe2024.decay", "section V-C, step sizes", "decayed by 0.99 after 10 rounds", "read as: after every 10 rounds",
       _ERRATA + "test_the_rate_decays_after_every_ten_rounds", False),
    _E("fe2024.code", "the published code", "permutations for the first K clients, models drawn at random for the "
       "others", "Algorithm 1 has a permutation for each client: `per_client_permutations`; the code's schedule is "
       "`mixed_permutations`",
       "tests/federated/test_schedule.py::test_permutations_train_every_model_once_on_every_client_in_an_age", False),
    _E("fe2021.algorithm1", "Algorithm 1", "the server's update stands in the loop over the rounds r of an age t",
       "taken at its word: every round updates each model that a stratum has trained, not every age",
       "tests/federated/test_schedule.py::test_strata_train_every_model_once_in_an_age", False),
    _E("fe2021.flow", "section 9.2, local training", "gradient descent is replaced by gradient flow, without a term "
       "for it", "a term -(eta tau)^2 / (2 tau) E[Pi^2] a round, of the order of the terms of Lemmas 9.2 and 9.3",
       "tests/theory/test_second_order.py::test_an_age_to_second_order"),
    _E("fe2021.lemma92", "below Lemma 9.2", "the remainder's operator norm is o(eta tau^2)",
       "o(eta^2 tau^2), as in (9) and the proof", "tests/theory/test_second_order.py::test_lemmas", False),
    _E("fe2021.13", "eq. (13)", "the product of a round's factors rises to the right", "later rounds stand on the "
       "left: operators do not commute, and the printed order contradicts (14)", "fed_ensemble.second_order"),
    _E("fe2021.14", "eq. (14), left side", "the function at round tau (t K + r + 1)",
       "at the end of an age, (t + 1) K tau", "fed_ensemble.second_order", False),
    _E("fe2021.15", "below eq. (15)", "eta tau <= 2 K lambda / (K lambda + B_1)", "2 K lambda / ((K lambda)^2 + B_1): "
       "the printed sum has terms of different order in the step",
       _ERRATA + "test_condition_15_is_met_up_to_the_step_with_the_square"),
    _E("fe2021.18", "eq. (18), first line", "e^(-eta_0 lambda_m t K tau / (3 nbar)) after t ages",
       "without K, as the last lines of the proof have it; with K it is faster than the first-order rate for K > 3",
       "fed_ensemble.networks"),
    _E("fe2021.18movement", "eq. (18), second line, and (20)", "the factor 3 eta_0 nbar in (18), 3 eta_0 in (20)",
       "3, as in the induction over t_i, whose sum over ages agrees", "fed_ensemble.convergence"),
    _E("fe2021.26", "eq. (26)", "R_0 / l", "R_0 / sqrt(l), as in (19) and in the bound of D_1",
       _CONVERGENCE + "test_kappas_with_curvature", False),
    _E("fe2021.20", "eq. (19), (20) and (26), exponent of kappa_2", "C_2, a sum of C_i, in the exponent", "||Theta_i|| "
       "<= C_i^2, as a few lines later, and the sum is divided by nbar: where C_i is above 1 and steps are small, a "
       "linear model's residual grows by more than printed", "fed_ensemble.convergence"),
    _E("fe2021.kappa3", "kappa_3, before eq. (27)", "one round's bound of D_2, and N (N - 1) / 2 commutators",
       "D_3 sums K rounds' D_2, and has K (K - 1) / 2 commutators", "fed_ensemble.second_order", False),
    _E("fe2021.kappa4", "kappa_4, section 9.4", "e^(eta_0 tau / (nbar C_2^2)), and 2 C_2^2 l^(-1/2) for the kernel's "
       "change", "the integral gives e^(eta_0 tau C_2^2 / n_i), and the change has the constant 3 (1 + kappa_2) C_2 "
       "R_0 / lambda_m of (18); `gap_from_drift` is the bound for a measured change", "fed_ensemble.linearisation_gap",
       False),
    _E("fe2021.assumptions", "Theorem 9.1, assumptions", "kappa_2 < 1 and a large width", "the proof also needs "
       "kappa_3 small, weights by examples, each client once an age and equal local steps",
       _CONVERGENCE + "test_assumptions_one_by_one", False),
    _E("ntk_fl.9a", "eq. (9a) beside (9b), (10)", "eta / N with H in (9a), eta / (N C) in (10)",
       "eta / (N C) in both, else function and weights disagree",
       "tests/federated/ntk_fl/test_evolution.py::test_weights_equal_gradient_descent_on_the_linearised_network",
       False),
    _E("ntk_fl.steps", "eq. (9a)", "exp(-eta t H / N)", "(I - eta H / N)^t: (9b) and (10) sum over t steps of descent",
       "ntk_fl.evolution"),
    _E("ntk_fl.loss", "section 6, the loss", "the squared error", "the published code trains with the cross entropy: "
       "`loss=\"cross_entropy\"`; the squared error is the default",
       "tests/federated/ntk_fl/test_cross_entropy.py::test_weights_equal_descent_on_the_linearised_network", False),
    _E("ntk_fl.12", "eq. (12)", "f = 1/n sum_r c_r relu(v_r'x)", "n^(-1/2), which the kernel below (12), (39b), (54a) "
       "and (58b) need", "tests/theory/test_two_layer_relu.py::test_the_kernel_below_eq_12_needs_the_factor_root_n"),
    _E("ntk_fl.lemma1", "Lemma 1", "with probability 1 - delta for all examples at once", "Markov's inequality is for "
       "one example: a union over N, or Hoeffding's inequality", "ntk_fl.lemmas"),
    _E("ntk_fl.lemma2", "Lemma 2, (22) and (23) to (25)", "both weights have the residuals of one run",
       "the NTK weights have those of the linearised network: a second part of the distance is left out",
       "ntk_fl.weight_gap"),
    _E("ntk_fl.22", "eq. (22)", "no R", "times R, which (25d) and Lemma 1 give", _NTK + "test_lemma_2", False),
    _E("ntk_fl.fig9", "Figure 9", "the analytical upper bound is 2 sum gamma", "the coefficient 2 is chosen; Lemma 2's "
       "is sqrt(2 n d / pi) eta R / (delta alpha)", _NTK + "test_figure_9_s_bound_is_twice_a_sum", False),
    _E("ntk_fl.lemma3", "Lemma 3", "Markov's inequality for one entry of the kernel, summed over N^2",
       "for the sum itself, which gives N^2 for N", "ntk_fl.lemmas"),
    _E("ntk_fl.28", "eq. (28)", "\"if A_ir and A_jr happen\" phi is 0", "if neither happens; an entry changes by at "
       "most (|S_i| + |S_j|) x_i'x_j / n", "ntk_fl.lemmas", False),
    _E("ntk_fl.radius", "Theorems 1 and 2", "R small enough, with nothing that bounds R", "a neuron moves by at most 4 "
       "sqrt(N) |f_0 - y| / (sqrt(n) lambda) while the bound holds, which needs a width of the order of N^3 |f_0 - "
       "y|^2 / (delta alpha lambda^2)^2", _NTK + "test_theorem_1_where_all_its_assumptions_hold", False),
    _E("ntk_fl.theorem1", "Theorem 1", "stated of NTK-FL, proved of gradient descent on the network", "the network at "
       "NTK-FL's weights leaves the bound at large t; the linearised one decays by (1 - eta lambda / N)^2 a step",
       _NTK + "test_theorem_1_fails_for_the_weights_of_ntk_fl_at_large_times"),
    _E("ntk_fl.rate", "(14) and (15)", "1 - eta lambda / (2 N) of the squared residual", "true, but a quarter of the "
       "first-order rate, 1 - 2 eta lambda / N", "ntk_fl.convergence", False),
    _E("ntk_fl.delta", "proofs of Theorems 1 and 2", "probability 1 - delta, as of each of three lemmas",
       "delta / 3 for each lemma", _NTK + "test_proof_factor_is_51_and_76", False),
    _E("ntk_fl.assumption1", "Assumption 1", "Gaussian weights in every round", "in the first round only; over rounds "
       "S, H and R are about the weights of round 0", "ntk_fl.convergence", False),
    _E("ntk_fl.58b", "eq. (58b)", "a client's gradient is divided by N, and the server divides by M again",
       "FedAvg divides by the client's N_m; then the M of the rate, and of Remark 2, cancels for equal clients",
       _NTK + "test_theorem_2_where_all_its_assumptions_hold", False),
    _E("ntk_fl.table1", "Table 1", "MB", "MiB: FedAvg's 1,720 in 284 rounds are its 6.07 MiB a round; how CP-NTK-FL's "
       "Jacobians are compressed is not said", _ERRATA + "test_the_traffic_of_table_1_is_in_mebibytes"),
    _E("local_gd.27", "eq. (27)", "sum over k of (I - Pbar) (Qbar + Zbar)", "(I - Pbar)^k, as in (6)",
       "tests/theory/test_local_regression.py::test_the_limit_form_is_the_papers_matrices"),
    _E("local_gd.26", "below eq. (26)", "Qbar is the sum of P_i w_i*", "the mean, as (26) has it",
       "tests/theory/test_local_regression.py::test_the_limit_form_is_the_papers_matrices"),
    _E("local_gd.gram", "below eq. (21)", "X_i X_i' in R^(d x d)", "N x N",
       "tests/theory/test_local_regression.py::test_the_limit_form_is_the_papers_matrices", False),
    _E("local_gd.alpha", "Algorithm 3 and eq. (16), (63)", "alpha^0 = 0 in the first round of algorithm 3, alpha^1 in "
       "(16)", "both are built, `first_index` 0 and 1; with 0 the first round changes nothing",
       "tests/federated/test_corrected.py::test_modified_local_gd_equals_the_loop_at_its_index", False),
    _E("local_gd.line9", "Algorithm 3, line 9", "the mean of w_i^k", "of w_i^(k+1), the models just trained, as (63)",
       "tests/federated/test_corrected.py::test_modified_local_gd_equals_the_loop_at_its_index", False),
    _E("local_gd.loss", "section 2.1 and Figure 1 (a)", "the loss 1/(2N) |y - X w|^2 with eta = 1e-4",
       "without 1/N, at which local work ends as the figure shows: with it much of a local residual is left",
       "tests/experiments/local_gd/test_figures.py::test_figure_1a_with_the_printed_loss_is_not_its_closed_form"),
    _E("deep_linear.coefficient", "eq. (1), (5)", "d_y", "d_out", "deep_linear.rounds", False),
    _E("deep_linear.loss", "L(t) in the proof of (18)", "|U - Y|^2", "the loss of (3), (4) times 2 N: (18) is the same "
       "for both", "deep_linear.convergence", False),
    _E("deep_linear.between", "hypothesis B, last line, and the sum in its proof",
       "m^((i-j+1)/2) and m^((L-i+1-s)/2) for W^(j:i)", "m^((j-i+1)/2) and m^((j-i+1-s)/2): the product has j - i + 1 "
       "layers", "deep_linear.convergence", False),
    _E("deep_linear.18", "eq. (18)", "the squared norm falls by rho", "the proof bounds the norm by rho, so the square "
       "by rho^2; to first order the square falls by 1 - 2 eta K lambda_min / N, four times the rate of (18)",
       "tests/theory/test_deep_linear_rounds.py::test_the_linear_rate_is_that_of_many_rounds_and_not_of_each", False),
    _E("deep_linear.rank", "Theorem IV.2", "lambda_min(P(0)) and sigma_min(X) above 0", "P(0) is singular beyond the "
       "range of X: both are the least on that range, and targets are W* X",
       "tests/theory/test_deep_linear_gram.py::test_the_ends_of_the_spectrum_on_the_range_of_the_inputs"),
    _E("deep_linear.33", "eq. (33), (25) and Lemma VII.7", "57 eta sigma_max^2 / (20 d_out)", "times L, which the "
       "bound 1.25^4 L sigma_max^2 / d_out of the kernel has; the third term keeps its share for eta smaller by L",
       "tests/theory/test_deep_linear_rounds.py::test_the_constants_are_those_of_the_paper", False),
    _E("deep_linear.radius", "hypothesis C", "R with the factor 4", "16, which the steps of its proof give",
       "tests/theory/test_deep_linear_rounds.py::test_the_constants_are_those_of_the_paper", False),
    _E("deep_linear.27", "eq. (27)", "lambda_min(X'X) <= lambda_min(X_c'X_c)", "for columns of full rank, n <= d; with "
       "n > d the least eigenvalue above 0 of X'X may be the larger",
       _ERRATA + "test_least_eigenvalues_are_ordered_for_few_examples_only"),
)  # fmt: skip
