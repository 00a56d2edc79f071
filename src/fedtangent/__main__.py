"""``python -m fedtangent``."""

from fedtangent.cli import main

if __name__ == "__main__":
    main()
