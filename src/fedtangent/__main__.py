"""``python -m fedtangent``."""

from fedtangent.cli.main import main

if __name__ == "__main__":
    main()
