"""Theory of Fed-ensemble, from the papers FE-2021 (arXiv) and FE-2024 (IEEE TASE)."""
