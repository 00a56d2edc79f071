"""Table II of Fed-ensemble: accuracy of FedAvg, FedProx, FedBE and Fed-ensemble, i.i.d. and two classes a client.

The papers train a two-layer CNN on MNIST and ResNet-18 on CIFAR-10, of 100 clients, ten local epochs in batches of 16,
K = 5; ResNet-34 on CIFAR-100 and an LSTM on Shakespeare's characters, of ten clients, i.i.d.; MobileNetV2 on OpenImage
by uploader (``--set model=shufflenet_v2`` is its other row), 130 asked and the first 100 kept. All methods send the
same bytes: every client that takes part trains one model in a round.
"""

from __future__ import annotations

from functools import partial

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import ClassifierSettings, published
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes
from fedtangent._src.experiments.lab.trials import IID, USERS

PUBLISHED = {  # FE-2024, Table II
    "mnist": {
        **published(IID, fed_avg=95.08, fed_prox=95.76, fed_be=95.21, fed_ensemble=97.75),
        **published(2, fed_avg=90.17, fed_prox=90.75, fed_ensemble=95.44),
    },
    "cifar10": {
        **published(IID, fed_avg=86.43, fed_prox=86.77, fed_be=83.13, fed_be_no_distillation=86.78, fed_ensemble=87.99),
        **published(2, fed_avg=66.11, fed_prox=66.62, fed_ensemble=71.18),
    },
    "cifar100": published(IID, fed_avg=56.25, fed_prox=55.91, fed_be=49.24, fed_ensemble=58.09),
    "shakespeare": published(IID, fed_avg=60.05, fed_prox=60.18, fed_be_no_distillation=61.52, fed_ensemble=62.49),
}
OF_OPENIMAGE = {  # by network
    "mobilenet_v2": published(USERS, fed_avg=51.85, fed_prox=52.93, fed_ensemble=53.92),
    "shufflenet_v2": published(USERS, fed_avg=53.98, fed_prox=54.42, fed_ensemble=55.75),
}


def run(study: Study) -> lab.Outcome:
    """Trains with every method of the table."""
    in_table = {**PUBLISHED, "openimage": OF_OPENIMAGE.get(study.settings.model, {})}
    return classifiers.outcome(study, "Table II", in_table, partial(classifiers.ahead, method="fed_ensemble"))


# Changes of the paper's settings for smaller scales.
SMOKE = (
    "num_clients=10 num_rounds=6 local_epochs=2 model=mlp width=32 tuning_rounds=4 learning_rates=0.1,0.3 "
    "weight_decay=0 num_train=300 num_validation=200 num_test=200 server_examples=50 distillation_epochs=300"
)
DIGITS = (
    "num_clients=50 num_rounds=60 local_epochs=5 model=mlp width=64 tuning_rounds=20 learning_rates=0.03,0.1,0.3,1 "
    "weight_decay=0 num_validation=288 server_examples=100 distillation_epochs=300"
)
IMAGES = (
    "num_clients=50 num_rounds=40 local_epochs=2 tuning_rounds=10 learning_rates=0.01,0.03,0.1 width=8 num_train=5000 "
    "num_validation=1000 num_test=2000 server_examples=500 distillation_epochs=80"
)
# Settings of the paper's CIFAR-10, CIFAR-100, Shakespeare and OpenImage that are not those of its MNIST. Those of the
# two last it does not give: the number of rounds and, of Shakespeare, of local epochs.
CIFAR10 = "model=resnet18 learning_rates=0.001,0.003,0.005,0.01,0.03"
CIFAR100 = "model=resnet34 learning_rates=0.003,0.01,0.03 num_clients=10 classes_per_client=0"
TEXT = (
    "methods=fed_avg,fed_prox,fed_be_no_distillation,fed_ensemble num_clients=10 classes_per_client=0 num_rounds=60 "
    "local_epochs=5 batch_size=128 model=lstm optimizer=adam learning_rates=0.0003,0.001,0.003 weight_decay=0"
)
UPLOADERS = (
    "methods=fed_avg,fed_prox,fed_ensemble num_clients=0 classes_per_client=-1 clients_per_round=130 keep_first=100 "
    "model=mobilenet_v2"
)
# Changes of a text's settings for smaller scales.
TEXT_SMOKE = (
    "num_rounds=4 tuning_rounds=3 local_epochs=1 batch_size=16 width=8 num_train=200 num_validation=50 num_test=100 "
    "learning_rates=0.003,0.01"
)
TEXT_DEFAULT = (
    "num_rounds=20 tuning_rounds=6 local_epochs=1 batch_size=32 width=64 num_train=6000 num_validation=500 "
    "num_test=1000 learning_rates=0.003,0.01"
)


def image_scales(
    paper: ClassifierSettings, smoke: str = "", default: str = ""
) -> dict[str, dict[str, ClassifierSettings]]:
    """Returns settings by data set and scale of a table of image data sets.

    Args:
        paper: The paper's settings for MNIST.
        smoke: Changes of SMOKE.
        default: Changes of DIGITS and IMAGES.
    """
    small, medium = with_changes(paper, SMOKE, smoke), with_changes(paper, IMAGES, default)
    return {
        "digits": by_scale(small, with_changes(paper, DIGITS, default)),
        "mnist": by_scale(small, medium, paper),
        "fashion_mnist": by_scale(small, medium, paper),
        "cifar10": by_scale(small, medium, with_changes(paper, CIFAR10)),
    }


METHODS = "methods=fed_avg,fed_prox,fed_be,fed_be_no_distillation,fed_ensemble"
PAPER, ON_TEXT, OF_UPLOADERS = (with_changes(ClassifierSettings(), text) for text in (METHODS, TEXT, UPLOADERS))
SCALES = {
    **image_scales(PAPER),
    "cifar100": by_scale(
        with_changes(PAPER, SMOKE, "classes_per_client=0"),
        with_changes(PAPER, IMAGES, "num_clients=10 classes_per_client=0"),
        with_changes(PAPER, CIFAR100),
    ),
    "shakespeare": by_scale(with_changes(ON_TEXT, TEXT_SMOKE), with_changes(ON_TEXT, TEXT_DEFAULT), ON_TEXT),
    "openimage": by_scale(
        with_changes(OF_UPLOADERS, SMOKE, "num_clients=0 clients_per_round=10 keep_first=8"),
        with_changes(OF_UPLOADERS, IMAGES, "num_clients=0 model=cnn"),
        OF_UPLOADERS,
    ),
}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=classifiers.check, least_seeds=2),)
