"""Text of pages that lies between comments which name its source."""


def filled(page: str, source: str, text: str) -> str:
    """Return `page` with `text` between the comments that name its source. Raises ValueError where they are missing."""
    begin, end = f"<!-- {source}, by scripts/docs.py -->", f"<!-- end of {source} -->"
    head, rest = page[: page.index(begin)], page[page.index(begin) :]
    return f"{head}{begin}\n\n{text}\n\n{rest[rest.index(end) :]}"
