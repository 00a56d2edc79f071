"""What several experiments share.

``runner``: what an experiment is, and runs any; ``results``: tables, intervals and claims, what it answers with.
``runs``: methods by rates by seeds, each run computed once and kept; ``trials``: the data that they share.
``league``, ``league_report``: the comparisons of the Fed-ensemble papers, and what they report.
``cohort``, ``cohort_report``: those of NTK-FL with its baselines.
``sine``: Fed-ensemble on sine functions; ``two_layer``: the problem of NTK-FL's theorems.
"""
