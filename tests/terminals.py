"""Standard output as a terminal or a file, in any encoding, and what it shows."""

import io
from typing import Any


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def console(encoding: str = "utf-8", kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> Any:
    return kind(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)


def shown(stream: Any) -> str:
    stream.flush()
    text: str = stream.buffer.getvalue().decode(stream.encoding)
    return text
