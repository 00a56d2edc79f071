"""One algorithm under several seeds, as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from fedtangent.history import Evaluation, History, Run, at_start, charge, check_rounds, first_rounds, stacked
from fedtangent.loop import chunk_length, info_shapes, run_chunk
from fedtangent.pytrees import take
from fedtangent.sweep import check_seeds, choose_over, map_members, single_device_engine
from fedtangent.types import Algorithm, Array, Engine, FederatedData, PyTree

MOST_SEEDS = 100_000


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds as written on a command line: ``"0:10"`` is 0 to 9, ``"0,3,7"`` those three; they may be combined.

    Raises ``ValueError`` for anything else, for an empty range, a seed given twice or beyond 2^32 - 1.
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = part.strip().split(":")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends):
            raise ValueError(f"seeds: got {text!r}, must be like 0:10 (0 to 9) or 0,3,7")
        numbers = [int(end) for end in ends]
        if max(numbers) > 2**32:
            raise ValueError(f"seeds: got {text!r}, must be from 0 to 2**32 - 1")
        if len(numbers) == 2 and numbers[1] - numbers[0] > MOST_SEEDS:
            raise ValueError(f"seeds: got {part.strip()!r}, must be at most {MOST_SEEDS} of them")
        if len(numbers) == 2 and numbers[0] >= numbers[1]:
            raise ValueError(f"seeds: got {part.strip()!r}, a range without a seed: its end must be above its start")
        seeds += numbers if len(numbers) == 1 else range(*numbers)
    return check_seeds(seeds)


@partial(jax.jit, static_argnames=("over", "algorithm", "engine", "length"))
def _advance(
    over: str, algorithm: Algorithm, engine: Engine, length: int, states: PyTree, data: FederatedData, rounds: Array
) -> tuple[PyTree, PyTree]:
    """``rounds`` more rounds of every run; states and infos have the seeds as their leading axis."""
    return map_members(over, lambda state: run_chunk(algorithm, engine, length, state, data, rounds), states)


def simulate_seeds(
    algorithm: Algorithm,
    data: FederatedData,
    num_rounds: int,
    seeds: Sequence[int],
    mapping: str = "auto",
    evaluate_every: int | None = None,
    evaluate: Callable[[PyTree], dict[str, Any]] | None = None,
    on_evaluation: Callable[[int, Evaluation], None] | None = None,
    progress: bool = False,
    over: str = "auto",
) -> dict[int, Run]:
    """``simulate`` for each of ``seeds``, in one compiled program; returns the run of each seed.

    Args:
        evaluate: ``state -> metrics``, called for each seed as ``simulate`` would.
        on_evaluation: called with the seed and its evaluation.
        over: as in ``sweep``: one run after another (``"map"``), all at once (``"vmap"``), by platform (``"auto"``).

    The other arguments are those of ``simulate``; ``mapping`` cannot be sharded. All runs are in memory at once. Each
    equals its own ``simulate``, to rounding. Raises ``ValueError`` for bad arguments, before any work.
    """
    every, seeds, how = check_rounds(num_rounds, evaluate_every), check_seeds(seeds), choose_over(over)
    engine = single_device_engine(data, mapping)
    states = jax.vmap(lambda seed: algorithm.init(jax.random.key(seed), data.num_clients))(
        jnp.asarray(seeds, jnp.uint32)
    )
    cost, shapes = algorithm.cost(data, engine), info_shapes(algorithm, engine, take(states, 0), data)
    length = min(chunk_length(shapes), num_rounds)
    evaluations: list[list[Evaluation]] = [[] for _ in seeds]
    chunks: list[list[PyTree]] = [[] for _ in seeds]
    sent = np.tile(np.array(at_start(cost), np.int64), (len(seeds), 1))

    def look(done: int) -> None:
        for i, seed in enumerate(seeds):
            metrics = evaluate(take(states, i)) if evaluate is not None else {}
            evaluations[i].append(Evaluation(done, metrics, int(sent[i, 0]), int(sent[i, 1])))
            if on_evaluation is not None:
                on_evaluation(seed, evaluations[i][-1])

    look(0)
    done, label = 0, f"{algorithm.name}, {len(seeds)} seeds"
    with tqdm(total=num_rounds, desc=label, unit="round", disable=None if progress else True, leave=False) as bar:
        while done < num_rounds:
            rounds = min(every - done % every, num_rounds - done, length)
            states, infos = _advance(how, algorithm, engine, length, states, data, jnp.int32(rounds))
            for i, mine in enumerate(chunks):
                mine.append(first_rounds(take(infos, i), rounds))
                sent[i] += charge(cost, mine[-1])
            done += rounds
            bar.update(rounds)
            if done % every == 0 or done == num_rounds:
                look(done)
    return {
        seed: Run(take(states, i), History(evaluations[i], stacked(shapes, chunks[i]), cost))
        for i, seed in enumerate(seeds)
    }
