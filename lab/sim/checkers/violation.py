"""An invariant did not hold."""


class Violation(BaseException):  # Production code contains any `Exception`.
    """`invariant` is one of I1 to I6, `what` a constant text: together the kind. `detail` varies."""

    def __init__(self, invariant: str, what: str, detail: str = "") -> None:
        super().__init__(f"{invariant} {what}{detail and ': '}{detail}")
        self.invariant = invariant
        self.what = what

    @property
    def kind(self) -> str:
        return f"{self.invariant} {self.what}"
