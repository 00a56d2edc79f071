"""BibTeX of the papers behind the algorithms and the data sets; ``fedtangent.cite(algorithm)`` returns it."""

from __future__ import annotations

from pathlib import Path

from fedtangent._src.entries import catalogue
from fedtangent._src.types import Algorithm

_ENTRIES = Path(__file__).with_suffix(".bib").read_text(encoding="utf-8").strip().split("\n\n")
PAPERS: dict[str, str] = {entry.partition("{")[2].partition(",")[0]: entry for entry in _ENTRIES}
"""BibTeX of each paper by its key, by which entries name their papers."""


def papers_of(algorithm: Algorithm | str) -> tuple[str, ...]:
    """Returns the papers of an algorithm: keys of papers.bib such as "mcmahan2017", or BibTeX.

    For an algorithm inside a wrapper, as in ``fed_prox_ensemble``, the papers of the wrapper (``fed_ensemble``) come
    first.

    Args:
        algorithm: An ``Algorithm``, or the name of one.

    Raises:
        ValueError: The algorithm has no entry.
    """
    name = algorithm if isinstance(algorithm, str) else algorithm.name
    entries = catalogue("algorithms")
    if name in entries:
        papers: tuple[str, ...] = entries[name].papers
        return papers
    for wrapper in (entry for entry in entries.values() if entry.has_base):
        inside, ending, rest = name.rpartition("_" + wrapper.name.removeprefix("fed_"))
        if inside and ending and not rest:
            return tuple(dict.fromkeys((*wrapper.papers, *papers_of(inside))))
    raise ValueError(f"algorithm: got {name!r}, allowed are {', '.join(entries)}")


def cite(algorithm: Algorithm | str) -> str:
    """Returns the BibTeX of an algorithm's papers, as in ``cite("fed_avg")``.

    Args:
        algorithm: An ``Algorithm``, or the name of one.

    Raises:
        ValueError: The algorithm has no entry.
    """
    return "\n\n".join(PAPERS.get(paper, paper) for paper in papers_of(algorithm))
