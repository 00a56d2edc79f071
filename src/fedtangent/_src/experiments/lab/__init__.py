"""What several experiments share.

``runner``: what an experiment is, and how any is run; ``results``: the tables, intervals and claims that it returns.
``runs``: runs of several methods, rates and seeds, each computed once and kept; ``trials``: the data that they share.
``league``, ``league_report``: the comparisons of the Fed-ensemble papers, and what they report.
``cohort``, ``cohort_report``: the same of NTK-FL and its baselines.
``sine``: Fed-ensemble on sine functions; ``two_layer``: the problem of NTK-FL's theorems.
"""
