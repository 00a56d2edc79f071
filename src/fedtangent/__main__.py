"""``python -m fedtangent``."""

from fedtangent.cli.command_line import main

if __name__ == "__main__":
    main()
