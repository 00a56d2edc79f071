"""Measures of a run: accuracy, uncertainty, conformal sets, paired intervals, privacy, kernels, loss surfaces."""

from fedtangent._src.comparison.evidence import variational_diagnostics
from fedtangent._src.comparison.forecast import ranked, rounds_to_target
from fedtangent._src.comparison.ledger import residual_ledger
from fedtangent._src.federated.predict import evaluate_clients
from fedtangent._src.measures.conformal import (
    ConformalPredictor,
    conformal_predictor,
    coverage_by_client,
    federated_quantile,
)
from fedtangent._src.measures.conformal_scores import conformal_scores
from fedtangent._src.measures.loss_surface import barrier, grid, mean_loss, plane_through, segment, surface
from fedtangent._src.measures.paired import differences
from fedtangent._src.measures.privacy import epsilon, noise_multiplier
from fedtangent._src.measures.tangent_kernels import alignment, drift, gram_operators, kernel_diagnostics, spectrum
from fedtangent._src.measures.uncertainty import (
    accuracy,
    brier_score,
    calibration_error,
    coverage,
    expected_calibration_error,
    knowledge_variance,
    mutual_information,
    negative_log_likelihood,
    predictive_entropy,
    predictive_interval,
    reliability,
)

__all__ = [
    "ConformalPredictor",
    "accuracy",
    "alignment",
    "barrier",
    "brier_score",
    "calibration_error",
    "conformal_predictor",
    "conformal_scores",
    "coverage",
    "coverage_by_client",
    "differences",
    "drift",
    "epsilon",
    "evaluate_clients",
    "expected_calibration_error",
    "federated_quantile",
    "gram_operators",
    "grid",
    "kernel_diagnostics",
    "knowledge_variance",
    "mean_loss",
    "mutual_information",
    "negative_log_likelihood",
    "noise_multiplier",
    "plane_through",
    "predictive_entropy",
    "predictive_interval",
    "ranked",
    "reliability",
    "residual_ledger",
    "rounds_to_target",
    "segment",
    "spectrum",
    "surface",
    "variational_diagnostics",
]
