"""`python -m kvchat`: the same program as the `kvchat` command."""

from kvchat.cli.main import run

if __name__ == "__main__":
    run()
