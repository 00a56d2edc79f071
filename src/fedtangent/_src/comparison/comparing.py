"""``compare`` trains networks of several widths and compares them with the federated flow and its limit."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from fedtangent._src.checks import seed as check_seed
from fedtangent._src.checks import whole
from fedtangent._src.comparison import followed
from fedtangent._src.comparison.cases import build
from fedtangent._src.comparison.from_start import FromStart, at_seed, compare_from, weights_of
from fedtangent._src.comparison.on_features import OnFeatures, compare_on_features
from fedtangent._src.comparison.settings import Report, Scale, Setting
from fedtangent._src.comparison.side_by_side import FEWEST_DRAWS, FEWEST_WIDTHS, Comparison, run
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.examples import Examples
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.engine.run import examples_of
from fedtangent._src.theory.checks import require_float64
from fedtangent._src.types import Algorithm, Key, Model, PyTree

WIDTHS, DRAWS = (64, 256, 1024), 16
Compared: TypeAlias = Comparison | OnFeatures | FromStart  # networks beside their prediction, whichever theory made it


def compare(
    algorithm: Algorithm,
    data: Dataset | str | tuple[Any, ...] | Examples,
    clients: Any = None,
    *,
    num_rounds: int,
    seed: int = 0,
    start: Key | PyTree | None = None,
    evaluation: Evaluation = Evaluation(),
    widths: Sequence[int] = WIDTHS,
    draws: int = DRAWS,
) -> Compared:
    """Simulates a run and compares it with what theory predicts for the same rounds, cohorts and minibatches.

    Networks are trained in float64 (``fedtangent.enable_x64()``) from ``draws`` independent initialisations at several
    widths, and compared with the federated flow of infinite width. An algorithm without a closed form is compared with
    the same run on the features of the kernel, if a measurement shows that the kernel determines its runs. If it does
    not, if the model has no analytic kernel or cannot be built at other widths, or if there is a ``start``, a single
    network is compared with its linearisation at the start: any model and any algorithm.

    Args:
        algorithm: The algorithm.
        data: A ``Dataset``, the name of one, or arrays (x_train, y_train) or (x_train, y_train, x_test, y_test).
            Without test examples the training examples take their place.
        clients: Who holds which training example: a ``Partition``, a list of index arrays, or the user of each example
            [n].
        num_rounds: Communication rounds R.
        seed: Seed of initialisations, schedule and minibatches.
        start: Beginning of the models, as in ``simulate``: parameters, for example pre-trained weights, of one model or
            of each, or a typed key to initialise from; None: independent initialisations at every width, or one from
            ``seed`` where theory has to linearise at a start.
        evaluation: Rounds between evaluations (default: a number that makes eight), and progress.
        widths: Widths of all hidden layers, three or more; ignored for a linear model.
        draws: Initialisations of the K models at every width, five or more. Leave ``widths`` and ``draws`` out with a
            ``start`` or without an analytic kernel; they have no effect if the measurement leads to a linearisation,
            which the result's ``notes`` then say.

    Returns:
        Verdicts with their negative controls, and all curves: a ``Comparison`` with the closed form, an ``OnFeatures``
        with the kernel's features, or a ``FromStart`` with the linearisation. Its ``notes`` say why.

    Raises:
        ValueError: Before networks are trained: 64-bit types are off, an argument is out of range, or no theory follows
            the algorithm (the message says why).
        FloatingPointError: The closed form leaves the range of float64, because the run is not stable.
    """
    require_float64()
    if np.ndim(widths) == 0:
        raise ValueError(f"widths: got {widths!r}, must be whole numbers such as (64, 256, 1024)")
    seed = check_seed(seed)
    examples = examples_of(algorithm, data, clients)
    setting = comparison_of(algorithm, examples, num_rounds, seed, evaluation, tuple(widths), draws, start)
    return compared(setting, evaluation.progress)


def compared(setting: Setting, progress: bool | None = False, say: Report = lambda line: None) -> Compared:
    """Simulates the run of ``setting``, predicts it by the first theory that follows it, and compares both.

    Args:
        setting: The run.
        progress: Whether to show progress; None: if the work takes some seconds.
        say: Called with a line of text for each step of the work.

    Raises:
        NotFollowed: No theory follows the algorithm.
        FloatingPointError: The closed form leaves the range of float64, because the run is not stable.
    """
    begun = time.perf_counter()
    if setting.start is not None:
        return compare_from(setting, progress, say)
    if isinstance(setting.rule, str):
        try:
            return compare_on_features(setting, progress, say)
        except followed.NotFollowed as error:
            tried = {"whether the kernel determines the run": time.perf_counter() - begun}
            at_start = compare_from(at_seed(setting, str(error)), progress, say)
            how = f"{at_start.how}; it is one run of a single width, on which widths and draws have no effect"
            return dataclasses.replace(at_start, how=how, times=tried | at_start.times)
    return run(setting, progress, say)


def compare_case(
    name: str,
    *,
    scale: str = "default",
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[Comparison]:
    """Compares a standard case of ``fedtangent compare`` with theory: networks by Fed-ensemble and by NTK-FL.

    Args:
        name: Name of the case, such as "sine" or "digits"; ``fedtangent list cases`` shows all.
        scale: "smoke", "default" or "paper".
        seed: Seed of data, schedule and initialisations.
        data_dir: Folder of the data sets' files; None for $FEDTANGENT_DATA (``fedtangent data --help``).
        progress: Whether to show progress; None: if the work takes some seconds.

    Returns:
        One comparison for each setting of the case.

    Raises:
        ValueError: The name or the scale is unknown, files of data are missing, or 64-bit types are off
            (``fedtangent.enable_x64()``).
    """
    require_float64()
    return [run(setting, progress) for setting in build(name, data_dir, scale, seed)]


def comparison_of(
    algorithm: Algorithm,
    examples: Examples,
    num_rounds: int,
    seed: int,
    evaluation: Evaluation,
    widths: tuple[int, ...],
    draws: int,
    start: Key | PyTree | None = None,
) -> Setting:
    """Builds the setting that ``compare`` runs, from the same arguments; raises ``ValueError`` as ``compare`` does."""
    followed.check_evaluation(evaluation)
    whole("num_rounds", num_rounds)
    every = followed.evaluated_every(evaluation, num_rounds)
    if start is not None or not followed.has_limit(algorithm.model):
        for name, value, default in (("widths", widths, WIDTHS), ("draws", draws, DRAWS)):
            if value != default:
                why = "with a start or without an analytic kernel: a single network is trained then"
                raise ValueError(f"{name}: got {value}, must be left out {why}")
        weights = weights_of(algorithm, examples.clients.num_clients, examples.data.x[:2], seed, start)
        return followed.setting_of(
            algorithm, examples, Scale((1,), 1, num_rounds, every), seed, own_width=True, start=weights
        )
    whole("draws", draws, FEWEST_DRAWS)
    widths = check_widths(algorithm.model, widths)
    if algorithm.composition.rebuild is None:
        algorithm.on(algorithm.model)  # raises an error that says what can be done
    setting = followed.setting_of(algorithm, examples, Scale(widths, draws, num_rounds, every), seed)
    followed.check_kernels(algorithm.model, setting.problem.x_train[:2])
    return setting


def check_widths(model: Model, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the different widths in rising order, or ``(1,)`` for a model that has no other widths (a linear one).

    Args:
        model: Network that is compared.
        widths: Widths of its hidden layers; three or more different ones.

    Raises:
        ValueError: There are fewer than three widths, a width is no whole number from 1, or the model has no analytic
            kernel.
    """
    for width in widths:
        whole("widths", width)
    followed.check_analytic(model)
    if model.at_width is None:
        return (1,)
    rising = tuple(sorted(set(widths)))
    if len(rising) < FEWEST_WIDTHS:
        raise ValueError(f"widths: got {widths}, must be {FEWEST_WIDTHS} or more different ones")
    return rising
