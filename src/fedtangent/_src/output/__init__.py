"""What a person sees: tables on the terminal, figures, and the files of an output folder."""
