"""NTK-FL, fig. 4(a): test accuracy by round on FEMNIST's digits, where clients are writers: feature skew."""

from __future__ import annotations

from fedtangent.experiments.lab.cohort import DIGITS, IMAGES, CohortSettings
from fedtangent.experiments.lab.cohort_report import CURVES, figure_4
from fedtangent.experiments.lab.settings import by_scale, same

# The writers of digits in LEAF's sample of FEMNIST, of which the paper has 300; of another sample: --set num_clients=
WRITERS = CohortSettings(partition="writers", num_clients=102, num_validation=1000)
SMALL = CohortSettings(
    **{**IMAGES, "num_clients": WRITERS.num_clients, "clients_per_round": 20, "num_train": 0, "num_test": 0},
    partition="writers",
)

ENTRIES = (
    figure_4(
        __name__,
        {
            "digits": same(CohortSettings(**DIGITS, partition="shifted")),
            "femnist_digits": by_scale(SMALL, SMALL, WRITERS),
        },
        {
            "digits": "no writers are known for scikit-learn's digits: each client distorts its images in its own way "
            "(contrast, brightness, a shift by a pixel), in the test set clients are drawn at random",
            "femnist_digits": "the writers of the data folder's sample of FEMNIST, fewer than the paper's 300",
        },
        CURVES,
    ),
)
