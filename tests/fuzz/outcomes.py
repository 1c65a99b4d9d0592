"""The outcome of a case that only the case itself can see."""


class OtherMeaning(Exception):
    """An input was accepted as something that it does not say."""


def expect(condition: bool, what: str) -> None:
    """Raise OtherMeaning unless the condition holds."""
    if not condition:
        raise OtherMeaning(what)
