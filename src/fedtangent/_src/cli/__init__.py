"""What the command line does, one file per command: ``prepare`` checks everything, ``run`` does the work."""
