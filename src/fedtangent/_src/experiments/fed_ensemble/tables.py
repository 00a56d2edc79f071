"""Tables II to VII of Fed-ensemble, and its figures 4 and 6: methods on one data set at equal rounds and bytes.

Table II: the papers train a two-layer CNN on MNIST and ResNet-18 on CIFAR-10, with 100 clients, ten local epochs in
batches of 16, and K = 5 models; ResNet-34 on CIFAR-100 and an LSTM on Shakespeare's characters, with ten clients,
i.i.d.; and MobileNetV2 on OpenImage, with one client per uploader, of whom 130 are asked and the first 100 kept
(``--set model=shufflenet_v2`` is the other row of OpenImage). All methods send the same bytes: every client that takes
part trains one model in a round.

Table III: in Fed-ensemble a writer of FEMNIST weighs the models by their loss on its own training examples (eq. (4) of
FE-2024). The paper says neither how FEMNIST was trained nor gamma, Ditto's lambda and FedDyn's alpha: they are
settings, the same for all data sets.

Table IV: the paper's data are CIFAR-10 with ResNet-18, and 2, 4, 6, 8 and 10 classes a client.

Table V: with more models the ensemble's accuracy rises at first; each model then sees fewer clients in a round, and its
own accuracy falls while the entropy of its predictions rises (MNIST, K from 3 to 80, i.i.d.). ``table6`` is Table VI.

Table VII: the paper sees no difference i.i.d., and a gain of permutations with two classes a client (CIFAR-10, K = 5).

Fig. 4: test accuracy by round on Shakespeare. ``fed_ensemble.table2`` draws such curves, figures 4 to 6 of FE-2021, on
each data set.

Fig. 6: the paper's data are CIFAR-10, i.i.d. In a round each of the K models, or the single model, is trained by one
client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import classifiers
from fedtangent._src.experiments.fed_ensemble.classifiers import LABELS, LAST, ClassifierSettings, Scores, published
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes
from fedtangent._src.experiments.lab.trials import DISTORTED, IID, USERS, scheme_name

PUBLISHED_2 = {  # FE-2024, Table II
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


AHEAD_OF_ALL = partial(classifiers.ahead, method="fed_ensemble")


def run_2(study: Study) -> lab.Outcome:
    """Trains every method of FE-2024's Table II, and judges if Fed-ensemble is more accurate than each other one.

    An accuracy is the mean over the last three rounds.
    """
    in_table = {**PUBLISHED_2, "openimage": OF_OPENIMAGE.get(study.settings.model, {})}
    return classifiers.outcome(study, "Table II", in_table, AHEAD_OF_ALL)


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
    """Returns the settings of a table by data set and scale, for four image data sets.

    Args:
        paper: The paper's settings for MNIST.
        smoke: Changes of the smoke scale as texts "name=value", applied after the changes that all tables share.
        default: Changes of the default scale, in the same form and order.
    """
    small, medium = with_changes(paper, SMOKE, smoke), with_changes(paper, IMAGES, default)
    return {
        "digits": by_scale(small, with_changes(paper, DIGITS, default)),
        "mnist": by_scale(small, medium, paper),
        "fashion_mnist": by_scale(small, medium, paper),
        "cifar10": by_scale(small, medium, with_changes(paper, CIFAR10)),
    }


METHODS_2 = "methods=fed_avg,fed_prox,fed_be,fed_be_no_distillation,fed_ensemble"
PAPER_2, ON_TEXT, OF_UPLOADERS = (with_changes(ClassifierSettings(), text) for text in (METHODS_2, TEXT, UPLOADERS))
SCALES_2 = {
    **image_scales(PAPER_2),
    "cifar100": by_scale(
        with_changes(PAPER_2, SMOKE, "classes_per_client=0"),
        with_changes(PAPER_2, IMAGES, "num_clients=10 classes_per_client=0"),
        with_changes(PAPER_2, CIFAR100),
    ),
    "shakespeare": by_scale(with_changes(ON_TEXT, TEXT_SMOKE), with_changes(ON_TEXT, TEXT_DEFAULT), ON_TEXT),
    "openimage": by_scale(
        with_changes(OF_UPLOADERS, SMOKE, "num_clients=0 clients_per_round=10 keep_first=8"),
        with_changes(OF_UPLOADERS, IMAGES, "num_clients=0 model=cnn"),
        OF_UPLOADERS,
    ),
}
SUMMARY_TABLE2 = (
    "Table II of Fed-ensemble: accuracy of FedAvg, FedProx, FedBE and Fed-ensemble, i.i.d. and two classes a client."
)


WRITERS = published(
    USERS, fed_avg=77.9, ditto=80.2, lg_fed_avg=46.0, fed_ensemble=80.5, fed_dyn=82.0, fed_dyn_ensemble=83.4
)
# Pairs of methods of which the paper finds the first to be more accurate.
AHEAD = (
    ("fed_ensemble", "fed_avg"),
    ("fed_ensemble", "ditto"),
    ("ditto", "fed_avg"),
    ("fed_avg", "lg_fed_avg"),
    ("fed_dyn", "fed_avg"),
    ("fed_dyn_ensemble", "fed_dyn"),
    ("fed_dyn_ensemble", "fed_ensemble"),
)


def check(study: Study) -> None:
    """Raises ``ValueError`` for clients without test examples of their own, or other wrong settings."""
    for classes in study.settings.classes_per_client:
        if classifiers.divide(study, classes, study.seeds[0]).by_client is None:
            allowed = f"{USERS} (users of the data set) or {DISTORTED} (distorted images)"
            raise ValueError(
                f"classes_per_client: got {classes}, must be {allowed}: only these clients have test examples"
            )
    classifiers.check(study)


def run_3(study: Study) -> lab.Outcome:
    """Runs FE-2024's Table III: tunes and trains every method, and compares accuracies on clients' own examples."""
    in_table = {"femnist": WRITERS}
    return classifiers.outcome(study, "Table III", in_table, _claims, lambda scores: (_own_predictions(scores),))


def _own_predictions(scores: Sequence[Scores]) -> lab.Sheet:
    """Builds the table of accuracies of a client's own prediction, and of the prediction that all clients share.

    The own prediction is tested on the client's and on another client's examples.
    """
    rows = []
    for f in scores:
        percents = {name: 100 * float(f.values[name].mean()) for name in ("accuracy", "shared", "others")}
        rows.append({"clients": scheme_name(f.classes), "method": f.entrant.label, **percents})
    columns = "clients: {clients} | method: {method} | its own prediction %: {accuracy:.2f} | everybody's %: "
    columns += "{shared:.2f} | its own, on another's examples %: {others:.2f}"
    return lab.table("whose prediction, on whose examples", rows, columns)


def _claims(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges which methods are more accurate (FE-2024's Table III), and whether own predictions help their clients.

    A client's own prediction should be more accurate on its examples than the shared one, and less accurate on another
    client's examples.
    """
    for (classes,), group in lab.grouped(scores, "classes").items():
        by_method = {f.entrant.method: f for f in group}
        for one, other in AHEAD:
            if one in by_method and other in by_method:
                yield classifiers.more_accurate(by_method[one], by_method[other])
        for name in ("fed_ensemble", "fed_dyn_ensemble", "ditto"):
            if name in by_method:
                label, values = f"{scheme_name(classes)}: {by_method[name].entrant.label}", by_method[name].values
                over_shared = lab.interval(values["accuracy"] - values["shared"])
                yield over_shared.claim_above(f"{label}: a client predicts better for itself than everybody")
                over_others = lab.interval(values["accuracy"] - values["others"])
                yield over_others.claim_above(f"{label}: and better for itself than for another")


METHODS_3 = "methods=fed_avg,ditto,lg_fed_avg,fed_ensemble,fed_dyn,fed_dyn_ensemble"
FEW = (
    "num_clients=0 num_rounds=30 local_epochs=2 model=mlp width=100 weight_decay=0 learning_rates=0.03,0.1,0.3,1 "
    "tuning_rounds=10 num_validation=1500"
)
BY_DISTORTION = with_changes(ClassifierSettings(), METHODS_3, "classes_per_client=-2 num_models=5")
BY_WRITER = with_changes(ClassifierSettings(), METHODS_3, "classes_per_client=-1")
SCALES_3 = {
    "digits": by_scale(with_changes(BY_DISTORTION, SMOKE), with_changes(BY_DISTORTION, DIGITS)),
    "femnist": by_scale(
        with_changes(BY_WRITER, SMOKE, "num_train=1000 num_test=100"),
        with_changes(BY_WRITER, FEW),
        with_changes(BY_WRITER, "num_clients=0"),
    ),
}
SUMMARY_TABLE3 = (
    "Table III of Fed-ensemble: FEMNIST by writer, each tested on its own examples; personal models and weights."
)


PUBLISHED_4 = {
    "cifar10": {
        **published(2, fed_avg=66.19, fed_prox=66.87, fed_ensemble=71.45),
        **published(4, fed_avg=83.90, fed_prox=84.40, fed_ensemble=86.12),
        **published(6, fed_avg=85.90, fed_prox=86.10, fed_ensemble=87.14),
        **published(8, fed_avg=85.90, fed_prox=86.06, fed_ensemble=87.33),
        **published(10, fed_avg=86.52, fed_prox=86.77, fed_ensemble=87.94),
    }
}


def claims_4(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether Fed-ensemble is more accurate than each other method, and by more with the fewest classes.

    The lead is compared between clients of the fewest and of the most classes each. Accuracies are means over the last
    three rounds.
    """
    yield from classifiers.ahead(scores, "fed_ensemble")
    counts = sorted({f.classes for f in scores})
    accuracy = {(f.entrant.method, f.classes): f.values["accuracy"] for f in scores}
    if ("fed_ensemble", counts[0]) not in accuracy:
        return
    for other in dict.fromkeys(f.entrant.method for f in scores if f.entrant.method != "fed_ensemble"):
        leads = np.array([accuracy["fed_ensemble", c] - accuracy[other, c] for c in counts])  # [counts, seeds]
        statement = f"the lead over {LABELS[other]} is larger with {counts[0]} classes a client than with {counts[-1]}"
        yield lab.interval(leads[0] - leads[-1]).claim_above(statement)


PAPER_4 = "methods=fed_avg,fed_prox,fed_ensemble classes_per_client=2,4,6,8,10"
SCALES_4 = image_scales(with_changes(ClassifierSettings(), PAPER_4), smoke="classes_per_client=2,10")
SUMMARY_TABLE4 = (
    "Table IV of Fed-ensemble: the fewer classes a client holds, the more Fed-ensemble is ahead of FedAvg and FedProx."
)


def _by_num_models(classes: int, percents: dict[int, float]) -> classifiers.Published:
    """Builds a table of Fed-ensemble's published accuracies in % by K, on clients of ``classes`` classes."""
    return {(classifiers.Entrant("fed_ensemble", k).key, classes): percent for k, percent in percents.items()}


PUBLISHED_5 = {  # FE-2024, tables V and VI
    "mnist": _by_num_models(IID, {3: 97.49, 5: 97.85, 20: 98.19, 40: 98.17, 80: 97.98}),
    "cifar10": {
        **_by_num_models(IID, {1: 86.4, 2: 88.6, 5: 88.0}),
        **_by_num_models(2, {1: 66.1, 2: 68.0, 5: 71.2}),
    },
}
# The best and the worst single model's percent on MNIST, and the mean entropy, by K.
SINGLE = {
    3: (95.50, 94.97, 0.16),
    5: (95.60, 95.00, 0.15),
    20: (95.57, 94.13, 0.16),
    40: (95.53, 93.54, 0.18),
    80: (94.84, 92.74, 0.20),
}


def _run(name: str, study: Study) -> lab.Outcome:
    """Runs FE-2024's Table V or VI, which ``name`` says: trains Fed-ensemble with every number of models."""
    return classifiers.outcome(study, name, PUBLISHED_5, claims_5, lambda scores: (_single_models(study, scores),))


def _single_models(study: Study, scores: Sequence[Scores]) -> lab.Sheet:
    """Builds the table of an ensemble's single models: best and worst accuracy, mean entropy of predictions."""
    rows = []
    for f in scores:
        percents = {name: 100 * float(f.values[name].mean()) for name in ("largest", "least")}
        best, worst, entropy = (SINGLE if study.dataset == "mnist" else {}).get(f.entrant.num_models, (None,) * 3)
        published = {"best": best, "worst": worst, "published": entropy}
        row = {"clients": scheme_name(f.classes), "k": f.entrant.num_models, **percents, **published}
        rows.append({**row, "entropy": float(f.values["entropy"].mean())})
    columns = "clients: {clients} | K: {k} | best %: {largest:.2f} | worst %: {least:.2f} | entropy: {entropy:.3f} | "
    columns += "published best: {best:.2f} | worst: {worst:.2f} | published entropy: {published:.2f}"
    return lab.table("the models of an ensemble by themselves", rows, columns)


def claims_5(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether the ensemble of most models is more accurate than the one of fewest, and its single models worse.

    Single models are judged by the worst one's accuracy and by the entropy of predictions. The most accurate ensemble
    is also compared with the one of fewest models.
    """
    for (classes,), group in lab.grouped(scores, "classes").items():
        ensembles = sorted(group, key=lambda f: f.entrant.num_models)
        best = max(ensembles, key=lambda f: float(np.mean(f.values["accuracy"])))
        least, most = ensembles[0], ensembles[-1]
        name, k = scheme_name(classes), [f.entrant.num_models for f in (least, best, most)]
        gain = classifiers.difference(most, least)
        yield gain.claim_above(f"{name}: K = {k[2]} is more accurate than K = {k[0]}")
        if best is not least:
            rise = classifiers.difference(best, least)
            yield rise.claim_above(f"{name}: the best, K = {k[1]}, is above K = {k[0]}")
        loss = classifiers.difference(most, least, "least")
        yield loss.claim_below(f"{name}: the worst model of K = {k[2]} is below that of K = {k[0]}")
        entropy = classifiers.difference(most, least, "entropy")
        yield entropy.claim_above(f"{name}: models of K = {k[2]} are less certain than those of K = {k[0]}")


PAPER_5 = with_changes(ClassifierSettings(), "methods=fed_ensemble classes_per_client=0 num_models=3,5,20,40,80")
SMALL = with_changes(PAPER_5, SMOKE, "num_models=2,5")
MNIST = by_scale(SMALL, with_changes(PAPER_5, IMAGES, "num_models=3,5,10,25"), PAPER_5)
SCALES_5 = {
    "digits": by_scale(SMALL, with_changes(PAPER_5, DIGITS, "num_models=1,2,5,10,25")),
    "mnist": MNIST,
    "fashion_mnist": MNIST,
}
TABLE_6 = "Table VI of Fed-ensemble: accuracy of one, two and five models, i.i.d. and two classes a client (CIFAR-10)."
SCALES_6 = image_scales(with_changes(ClassifierSettings(), "methods=fed_ensemble num_models=1,2,5"))
RUN_5, RUN_6 = partial(_run, "Table V"), partial(_run, "Table VI")
SUMMARY_TABLE5 = "Table V of Fed-ensemble: accuracy against the number of models K, of the ensemble and of its models."


PUBLISHED_7 = {
    "cifar10": {
        **published(IID, random_sampling=87.8, fed_ensemble=88.0),
        **published(2, random_sampling=70.6, fed_ensemble=71.2),
    }
}


SCALES_7 = image_scales(with_changes(ClassifierSettings(), "methods=random_sampling,fed_ensemble"))
SUMMARY_TABLE7 = (
    "Table VII of Fed-ensemble: every client trains every model once in K rounds, beside one drawn at "
    "random each round."
)


def _falls(scores: Sequence[Scores]) -> tuple[lab.Sheet, ...]:
    """Builds the table of how far each method's accuracy ends below its best."""
    rows = [
        {"clients": scheme_name(f.classes), "method": f.entrant.label, "fell": 100 * float(f.values["fell"].mean())}
        for f in scores
    ]
    title = f"accuracy of the last {LAST} rounds, below the best {LAST} of the run"
    return (lab.table(title, rows, "clients: {clients} | method: {method} | below its best %: {fell:.2f}"),)


def claims_fig4(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether Fed-ensemble ends above the other methods, and falls less below its best accuracy.

    Ends and bests are means over three rounds.
    """
    yield from classifiers.ahead(scores, "fed_ensemble")
    for (classes,), group in lab.grouped(scores, "classes").items():
        for ensemble in [f for f in group if f.entrant.method == "fed_ensemble"][:1]:
            for other in (f for f in group if f is not ensemble):
                statement = f"{scheme_name(classes)}: {other.entrant.label} falls by more than {ensemble.entrant.label}"
                yield classifiers.difference(other, ensemble, "fell").claim_above(statement)


TEN = "num_clients=10 batch_size=16 optimizer=sgd"
SCALES_FIG4 = {
    "digits": by_scale(with_changes(ON_TEXT, SMOKE, "optimizer=sgd"), with_changes(ON_TEXT, DIGITS, TEN)),
    "shakespeare": by_scale(with_changes(ON_TEXT, TEXT_SMOKE), with_changes(ON_TEXT, TEXT_DEFAULT), ON_TEXT),
}
SUMMARY_FIG4 = (
    "Fig. 4 of Fed-ensemble: test accuracy by round on Shakespeare; FedAvg and FedProx overfit, Fed-ensemble does not."
)


def claims_fig6(scores: Sequence[Scores]) -> Iterator[lab.Claim]:
    """Judges whether the mean prediction of models that walk over a ring of clients is better than one model's."""
    for walks in (f for f in scores if f.entrant.num_models > 1):
        for one in (f for f in scores if f.classes == walks.classes and f.entrant.num_models == 1):
            statement = f"the mean of {walks.entrant.num_models} walks is more accurate than one"
            yield classifiers.difference(walks, one).claim_above(statement)


PAPER_FIG6 = "methods=random_walk num_models=1,5 classes_per_client=0 num_clients=10 num_rounds=200"
SCALES_FIG6 = image_scales(with_changes(ClassifierSettings(), PAPER_FIG6), default="num_clients=10 num_rounds=100")
SUMMARY_FIG6 = (
    "Fig. 6 of Fed-ensemble: no server; one model that walks over a ring of ten clients, beside the mean "
    "of K such models."
)
BOTH = ("shi2024", "shi2021")
_entry = partial(experiment, __name__, papers=("shi2024",), check=classifiers.check, least_seeds=2)
RUN_4, RUN_7, RUN_FIG4, RUN_FIG6 = (
    partial(classifiers.outcome, name="Table IV", published=PUBLISHED_4, claims=claims_4),
    partial(classifiers.outcome, name="Table VII", published=PUBLISHED_7, claims=AHEAD_OF_ALL),
    partial(classifiers.outcome, name="Fig. 4", published=PUBLISHED_2, claims=claims_fig4, more=_falls),
    partial(classifiers.outcome, name="Fig. 6", published={}, claims=claims_fig6),
)
ENTRIES = (
    _entry(run_2, SCALES_2, papers=BOTH, part=("table2", SUMMARY_TABLE2)),
    _entry(run_3, SCALES_3, check=check, part=("table3", SUMMARY_TABLE3)),
    _entry(RUN_4, SCALES_4, papers=BOTH, part=("table4", SUMMARY_TABLE4)),
    _entry(RUN_5, SCALES_5, papers=BOTH, part=("table5", SUMMARY_TABLE5)),
    _entry(RUN_6, SCALES_6, part=("table6", TABLE_6)),
    _entry(RUN_7, SCALES_7, part=("table7", SUMMARY_TABLE7)),
    _entry(RUN_FIG4, SCALES_FIG4, papers=BOTH, part=("fig4", SUMMARY_FIG4)),
    _entry(RUN_FIG6, SCALES_FIG6, part=("fig6", SUMMARY_FIG6)),
)
