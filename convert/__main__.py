"""`python -m convert`: the same program as the command `convert`."""

from convert.cli.main import main

if __name__ == "__main__":
    main()
