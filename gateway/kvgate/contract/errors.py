"""The one error of the contract: which field is wrong, how, and what mends it."""

from __future__ import annotations


class ContractError(ValueError):
    """A value does not meet the contract.

    ``field`` is the dotted path of the offending field (``model.rope.theta``), ``problem`` says what is wrong without repeating
    the value (values may be secret), ``remedy`` says what would be accepted; it may be empty.
    """

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        self.field = field
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field}: {problem}" + (f"; {remedy}" if remedy else ""))

    def within(self, parent: str) -> ContractError:
        """The same error, with ``parent`` put before the path."""
        path = f"{parent}{self.field}" if self.field.startswith("[") else f"{parent}.{self.field}"
        return ContractError(path, self.problem, self.remedy)
