"""The command line, one file per command: ``prepare`` checks the options, ``run_job`` does the work."""
