"""`python -m profiler`."""

from profiler.cli import main

main()
