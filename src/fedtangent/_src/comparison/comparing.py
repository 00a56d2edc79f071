"""``compare`` compares any run with theory: networks of several widths, the flow of the same rounds, the limit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtangent._src.checks import seed as check_seed
from fedtangent._src.checks import whole
from fedtangent._src.comparison import followed
from fedtangent._src.comparison.cases import build
from fedtangent._src.comparison.from_start import FromStart, compare_from
from fedtangent._src.comparison.on_features import OnFeatures, compare_on_features
from fedtangent._src.comparison.settings import Scale, Setting
from fedtangent._src.comparison.side_by_side import FEWEST_DRAWS, FEWEST_WIDTHS, Comparison, run
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.examples import Examples
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.engine.run import examples_of
from fedtangent._src.theory.precision import require_float64
from fedtangent._src.types import Algorithm, Key, Model, PyTree

WIDTHS, DRAWS = (64, 256, 1024), 16


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
) -> Comparison | OnFeatures | FromStart:
    """Simulates a run and compares it with what theory predicts for the same rounds, cohorts and minibatches.

    Networks are trained in float64 (``fedtangent.enable_x64()``) from ``draws`` independent initialisations at several
    widths, and compared with the federated flow of infinite width. An algorithm without a closed form is compared with
    the same run on the features of the kernel, if the kernel determines its runs, which is measured. With a ``start``,
    the networks that begin there are compared with their linearisation at it: any model and any algorithm.

    Args:
        algorithm: The algorithm, for a model whose width can change (``Model.at_width``) or that is linear; with a
            ``start`` for any model.
        data: A ``Dataset``, the name of one, or arrays (x_train, y_train) or (x_train, y_train, x_test, y_test).
            Without test examples the training examples take their place.
        clients: Who holds which training example: a ``Partition``, a list of index arrays, or the user of each example
            [n].
        num_rounds: Communication rounds R.
        seed: Seed of initialisations, schedule and minibatches.
        start: Beginning of the models, as in ``simulate``: parameters, for example pre-trained weights, of one model or
            of each, or a typed key to initialise from; None: independent initialisations at every width.
        evaluation: Rounds between evaluations (default: a number that makes eight), and progress.
        widths: Widths of all hidden layers, three or more; without meaning for a linear model.
        draws: Initialisations of the K models at every width, five or more.

    Returns:
        Verdicts with their negative controls, and all curves: a ``Comparison``; an ``OnFeatures`` for an algorithm
        without a closed form; a ``FromStart`` with a ``start``.

    Raises:
        ValueError: Before anything is trained: 64-bit types are off, theory does not follow the algorithm (the message
            says why), the model has no analytic kernel, or an argument is out of range.
    """
    require_float64()
    if np.ndim(widths) == 0:
        raise ValueError(f"widths: got {widths!r}, must be whole numbers such as (64, 256, 1024)")
    check_seed(seed)
    examples = examples_of(algorithm, data, clients)
    if start is not None:
        for name, value, default in (("widths", tuple(widths), WIDTHS), ("draws", draws, DRAWS)):
            if value != default:
                raise ValueError(f"{name}: got {value}, must be left out with a start, where there is one network")
        return compare_from(algorithm, examples, num_rounds, seed, start, evaluation)
    setting = comparison_of(algorithm, examples, num_rounds, seed, evaluation, tuple(widths), draws)
    if setting.rule is None:
        return compare_on_features(setting, str(algorithm.rule), evaluation.progress)
    return run(setting, evaluation.progress)


def compare_case(
    name: str,
    *,
    scale: str = "default",
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[Comparison]:
    """Compares a standard case of ``fedtangent compare``: Fed-ensemble, NTK-FL and the limit beside theory.

    Args:
        name: Name of the case, such as "sine" or "digits"; ``fedtangent list cases`` shows all.
        scale: "smoke", "default" or "paper".
        seed: Seed of data, schedule and initialisations.
        data_dir: Folder of the data sets' files; None for the environment's (``fedtangent data --help``).
        progress: Whether to show progress; None: in terminals and notebooks.

    Returns:
        One comparison for each setting of the case.

    Raises:
        ValueError: The name or the scale is unknown, or 64-bit types are off (``fedtangent.enable_x64()``).
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
) -> Setting:
    """Builds the setting that ``compare`` runs, from the same arguments; raises ``ValueError`` as ``compare`` does."""
    followed.check_evaluation(evaluation)
    whole("num_rounds", num_rounds)
    whole("draws", draws, FEWEST_DRAWS)
    widths = check_widths(algorithm.model, widths)
    if algorithm.composition.rebuild is None:
        algorithm.on(algorithm.model)  # says what can be done
    size = Scale(widths, draws, num_rounds, followed.evaluated_every(evaluation, num_rounds))
    setting = followed.setting_of(algorithm, examples, size, seed, is_followed=not isinstance(algorithm.rule, str))
    followed.check_kernels(algorithm.model, setting.problem.x_train[:2])
    return setting


def check_widths(model: Model, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the widths in rising order, ``(1,)`` for a linear model.

    Args:
        model: Network that is compared.
        widths: Widths of its hidden layers.

    Raises:
        ValueError: There are fewer than three different widths, or the model has no analytic kernel or no other width.
    """
    for width in widths:
        whole("widths", width)
    followed.check_analytic(model)
    if model.is_linear:
        return (1,)
    if model.at_width is None:
        raise ValueError(
            f"model: got {model.name}, whose width cannot change, must be a model with at_width, such as "
            "from_stax(network, ..) of a function of the width; or start=.. compares it with its linearisation"
        )
    rising = tuple(sorted(set(widths)))
    if len(rising) < FEWEST_WIDTHS:
        raise ValueError(f"widths: got {widths}, must be {FEWEST_WIDTHS} or more different ones")
    return rising
