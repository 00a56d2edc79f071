"""The output of commands: tables on the terminal, figures, and the files of an output folder."""
