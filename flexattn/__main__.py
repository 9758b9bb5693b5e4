"""`python -m flexattn`, and `flexattn` on the command line: the folder of compiled kernels, to be shipped and filled ahead of use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flexattn.errors import FlexError
from flexattn.runtime import settings, store


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        given.command(given)
    except (FlexError, OSError) as error:
        print(f"flexattn: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flexattn", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser("export-cache", help="write all compiled kernels and tuned tiles to one archive")
    export.add_argument("file", type=Path, help="for example kernels.tar.gz")
    export.set_defaults(command=_export)
    warm = commands.add_parser("warm", help="fill the cache folder from an archive that export-cache wrote")
    warm.add_argument("file", type=Path)
    warm.set_defaults(command=_warm)
    return parser


def _export(given: argparse.Namespace) -> None:
    kernels, tuned = store.pack(given.file)
    print(f"{kernels} kernels and {tuned} tuned tiles of {settings.cache_dir()} written to {given.file}")


def _warm(given: argparse.Namespace) -> None:
    kernels, tuned = store.unpack(given.file)
    print(f"{kernels} kernels and {tuned} tuned tiles of {given.file} are in {settings.cache_dir()}")


if __name__ == "__main__":
    sys.exit(main())
