"""The errors a person can meet, and the exit code each one ends the command with.

A message states the rule and the numbers: "experts (10) must be a multiple of ranks (4)".
Inputs are checked at the boundary only; inside, code trusts what it was handed.
"""

from __future__ import annotations


class GatewiseError(Exception):
    """Base of every error raised on purpose. Exit code 1: our fault."""

    exit_code = 1


class InputError(GatewiseError):
    """The user's spec, file, model or option breaks a rule. Exit code 2."""

    exit_code = 2


class SpecError(InputError):
    """What a spec says breaks a rule that only shows with methods, models or prompts at hand.

    Raised without the name of the file, which whoever read the spec puts before it.
    """


class StoreError(GatewiseError):
    """The run folder could not be written or read: disk full, folder gone, not a run. Exit code 2."""

    exit_code = 2


class RuleError(GatewiseError):
    """A rule of honest measurement failed during a run (rows ≠ gates, open ≠ twin, ...). Exit code 1."""


class RankError(GatewiseError):
    """Another rank of the run is gone, stopped, or does not answer. Exit code 1."""


class GateFailed(GatewiseError):
    """A threshold the user asked to enforce was crossed. Exit code 3."""

    exit_code = 3
